"""A checkpoint saved under one layout is loaded under any other; damage is found before a tensor is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.workers import on_ranks
from run.checkpoint.sealed import resealed
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.measure.reference import sample_batch
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder, step_of
from shardwise.run.checkpoint.manifest import ContiguousRun, placed, read_manifest, taken
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.load import load, newest_intact, problems_of
from shardwise.training.checkpoint.save import Saver
from shardwise.training.checkpointing import Position
from training.runs import boxes, whole


def job(
    model: str = "tiny", devices: int = 1, precision: str = "fp32", seq: int = 32, optimizer: str = "adamw",
    **strategy: Any,
) -> Job:  # fmt: skip
    # A large epsilon: where a gradient is nearly zero, Adam would make rounding a whole step.
    moves = {"learning_rate": 1e-3, "epsilon": 1e-4}
    training = {"global_batch": 8, "seq": seq, "precision": precision, "optimization": moves}
    training["optimizer"] = optimizer
    return Job.from_dict({"model": model, "cluster": f"laptop:{devices}", "strategy": strategy, "training": training})


def own_share(one: Job, engine: Engine, step: int) -> Batch:
    return sample_batch(one, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp"))


def train(one: Job, folder: str, steps: int, resume: bool) -> dict[str, Any]:
    """Trains on from the newest checkpoint or from the beginning, saves; this rank's boxes of every tensor."""
    engine, place = Engine(one, seed=1 if resume else 0), CheckpointFolder(Path(folder))
    first = 0
    if resume:
        found = newest_intact([place])
        assert found is not None
        first = load(engine, found).step
    losses = [float(engine.step(own_share(one, engine, step)).loss) for step in range(first, first + steps)]
    saver = Saver(engine, place)
    saver.save(first + steps, {"data": Position(batch=first + steps).to_numbers(8), "losses": []}, wait=True)
    saver.finish()
    return {"losses": losses, "boxes": boxes(engine)}


LAYOUTS: list[Any] = [
    ("tiny", {"devices": 2, "tp": 2}, {"devices": 2, "dp": 2, "zero": 3}),
    pytest.param("tiny", {"devices": 4, "tp": 2, "pp": 2}, {"devices": 2, "dp": 2, "zero": 3}, marks=pytest.mark.slow),
    pytest.param("tiny", {"devices": 4, "dp": 4, "zero": 1}, {"devices": 4, "tp": 4}, marks=pytest.mark.slow),
    ("tiny-moe", {"devices": 4, "dp": 4, "ep": 4, "zero": 3}, {"devices": 2, "dp": 2, "tp": 1, "ep": 2}),
    pytest.param(
        "tiny",
        {"devices": 2, "dp": 2, "zero": 1, "offload": {"optimizer": 0.6, "target": "nvme"}},
        {"devices": 2, "tp": 2, "offload": {"optimizer": 0.3}},
        marks=pytest.mark.slow,
    ),
    (
        "tiny",
        {"devices": 2, "dp": 2, "zero": 3, "offload": {"optimizer": 1, "weights": 0.6, "gradients": 1}},
        {"devices": 1, "zero": 3, "offload": {"optimizer": 1, "weights": 1}},
    ),
    ("tiny", {"devices": 3, "pp": 2, "stage_tp": (2, 1), "stage_layers": (3, 1)}, {"devices": 2, "dp": 2, "zero": 3}),
    ("tiny", {"devices": 2, "tp": 2}, {"devices": 3, "pp": 2, "stage_dp": (1, 2), "zero": 1, "stage_layers": (1, 3)}),
    pytest.param(
        "tiny-moe",
        {"devices": 4, "pp": 2, "stage_tp": (2, 1), "stage_dp": (1, 2)},
        {"devices": 4, "dp": 4, "ep": 4, "zero": 3},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "tiny",
        {"devices": 4, "tp": 2, "pp": 2},
        {"devices": 4, "pp": 3, "stage_tp": (1, 2, 1), "stage_layers": (1, 2, 1)},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "tiny",
        {"devices": 3, "pp": 2, "stage_tp": (1, 2)},
        {"devices": 3, "pp": 2, "stage_dp": (2, 1), "zero": 1},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "tiny-mla",
        {"devices": 2, "pp": 2},
        {"devices": 4, "dp": 2, "tp": 2, "ep": 2, "zero": 2},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "before", "after"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_saved_here_and_loaded_there(tmp_path: Path, model: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two steps, a checkpoint, two more under another layout: as four in one process."""
    one, two = job(model, **before), job(model, **after)
    first = on_ranks(before["devices"], train, one, str(tmp_path / "a"), 2, False)
    second = on_ranks(after["devices"], train, two, str(tmp_path / "a"), 2, True)
    (alone,) = on_ranks(1, train, job(model), str(tmp_path / "b"), 4, False)
    assert np.allclose(first[0]["losses"] + second[0]["losses"], alone["losses"], rtol=1e-5)
    expected, found = whole([alone]), whole(second)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        worst = np.abs(found[key] - tensor).max()
        assert worst <= 1e-4 * max(np.abs(tensor).max(), 1e-6), key


@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit"])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    one = job("tiny-moe", devices=2, precision="bf16-fp32-grads", seq=8, optimizer=optimizer, dp=2, ep=2, zero=1)
    on_ranks(2, train, one, str(tmp_path / "a"), 2, False)
    interrupted = on_ranks(2, train, one, str(tmp_path / "a"), 1, True)
    straight = on_ranks(2, train, one, str(tmp_path / "b"), 3, False)
    expected, found = whole(straight), whole(interrupted)
    assert all(np.array_equal(expected[key], found[key]) for key in expected)


@pytest.mark.slow
def test_moments_in_eight_bits_go_on_under_another_layout(tmp_path: Path) -> None:
    """Their blocks are others there: nearly the same weights."""
    one, two = job(devices=2, optimizer="adam8bit", dp=2, zero=3), job(optimizer="adam8bit")
    on_ranks(2, train, one, str(tmp_path / "a"), 2, False)
    found = whole(on_ranks(1, train, two, str(tmp_path / "a"), 2, True))
    expected = whole(on_ranks(1, train, job(), str(tmp_path / "b"), 4, False))
    assert expected.keys() == found.keys()
    weights = [key for key in expected if key.startswith("weight/")]
    assert weights
    for key in weights:
        assert np.abs(found[key] - expected[key]).max() < 0.1 * 4e-3, key  # a tenth of four steps of 1e-3


def test_every_element_is_saved_once(tmp_path: Path) -> None:
    on_ranks(4, train, job(devices=4, dp=2, tp=2, zero=1), str(tmp_path), 1, False)
    manifest = read_manifest(tmp_path / "step-00000001")
    for saved in manifest.tensors.values():
        covered = np.zeros(saved.shape, int)
        for piece in saved.pieces:
            covered[tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.shape))] += 1
        assert (covered == 1).all()
    sizes = [shard.size for shard in manifest.files.values()]
    assert max(sizes) < 1.2 * min(sizes)  # the work is shared


DAMAGES = {
    "flipped": "checksum differs",
    "short": "bytes instead of",
    "missing": "is missing",
    "link": "is a link",
    "manifest": "malformed JSON",
    "escape": "its checksum differs",
    "position": "its checksum differs",
    "number": "it has no optimizer_steps",
    "renamed": "is of step 2, not of the step in its name",
}


def damage(folder: Path, how: str) -> None:
    """Of the newer one of two checkpoints."""
    newest = folder / "step-00000002"
    shard, manifest = newest / "shard-00001.safetensors", newest / "manifest.json"
    raw = bytearray(shard.read_bytes())
    if how == "flipped":
        raw[-3] ^= 1
        shard.write_bytes(raw)
    elif how == "short":
        shard.write_bytes(raw[:-1])
    elif how == "missing":
        shard.unlink()
    elif how == "link":
        shard.rename(folder / "elsewhere")
        shard.symlink_to(folder / "elsewhere")
    elif how == "manifest":
        manifest.write_text("{", encoding="utf-8")
    elif how == "position":
        manifest.write_text(manifest.read_text().replace('"batch": 2', '"batch": 1'), encoding="utf-8")
    elif how == "number":
        resealed(newest, lambda document: document["numbers"].pop("optimizer_steps"))
    elif how == "renamed":
        newest.rename(folder / "step-00000007")
    else:
        manifest.write_text(manifest.read_text().replace("shard-00001", "../x-00001"), encoding="utf-8")


def newest_in(folders: list[str]) -> list[tuple[int | None, list[str]]]:
    """The newest good checkpoint of each folder, and what is said of those after it."""
    found = []
    for folder in folders:
        said: list[str] = []
        newest = newest_intact([CheckpointFolder(Path(folder))], said.append)
        found.append((None if newest is None else step_of(newest), said))
    return found


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path) -> None:
    """One run, and a copy of its folder for each kind of damage."""
    one, whole_run = job(devices=2, dp=2), tmp_path / "whole"
    on_ranks(2, train, one, str(whole_run), 1, False)
    on_ranks(2, train, one, str(whole_run), 1, True)
    for how in DAMAGES:
        shutil.copytree(whole_run, tmp_path / how)
        damage(tmp_path / how, how)
    found = on_ranks(2, newest_in, [str(tmp_path / how) for how in DAMAGES])[0]
    for (how, words), (step, said) in zip(DAMAGES.items(), found, strict=True):
        assert step == 1, how
        assert words in said[0], how
        assert ("step-00000007" if how == "renamed" else "step-00000002") in said[0], how


def refuses(one: Job, folder: str) -> str:
    engine = Engine(one)
    before = boxes(engine)
    with pytest.raises(SpecError) as caught:
        load(engine, Path(folder))
    assert all(np.array_equal(a[3], b[3]) for a, b in zip(before, boxes(engine)))
    return str(caught.value)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    on_ranks(1, train, job(), str(tmp_path), 1, False)
    (text,) = on_ranks(1, refuses, job("tiny-mla"), str(tmp_path / "step-00000001"))
    assert "has no" in text or "has the shape" in text


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with (
        folder.locked(),
        pytest.raises(SpecError, match=r"process \d+ is training in it"),
        CheckpointFolder(tmp_path).locked(),
    ):
        pass
    with folder.locked():
        pass


def test_old_checkpoints_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in range(1, 9):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text("{}", encoding="utf-8")
    (tmp_path / "step-00000009.part-x").mkdir()
    assert folder.committed()[0] == 8
    folder.retain(2, every=4)
    assert folder.committed() == [8, 7, 4]
    folder.clear_unfinished()
    assert not (tmp_path / "step-00000009.part-x").exists()


@pytest.mark.parametrize("change", [{"format": 2}, {"step": -1}, {"files": []}, {"tensors": {"a": {"shape": [1]}}}])
def test_a_strange_manifest_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    sound = {"format": 1, "step": 1, "job": {}, "numbers": {}, "files": {}, "tensors": {}}
    (tmp_path / "manifest.json").write_text(json.dumps({**sound, **change}), encoding="utf-8")
    with pytest.raises(SpecError):
        read_manifest(tmp_path)
    assert problems_of(tmp_path)


@settings(deadline=None)
@given(st.data())
def test_runs_follow_slicing(data: st.DataObject) -> None:
    """Cuts of cuts name the elements that slicing twice gives."""
    size, blocks = data.draw(st.sampled_from([12, 24])), data.draw(st.sampled_from([1, 2, 3]))
    values, runs = torch.arange(size), [ContiguousRun(0, size)]
    each = size // blocks
    first = data.draw(st.integers(0, each - 1))
    last = data.draw(st.integers(first + 1, each))
    values = torch.cat([block[first:last] for block in values.chunk(blocks)])
    starts = range(0, size, each)
    runs = [run for start in starts for run in taken(runs, start + first, start + last)]
    low = data.draw(st.integers(0, len(values) - 1))
    high = data.draw(st.integers(low + 1, len(values)))
    values, runs = values[low:high], taken(runs, low, high)
    for place in placed([runs]):
        begin = place.box.start[0]
        assert values[place.local[0]].tolist() == list(range(begin, begin + place.box.shape[0]))
    assert sum(run.size for run in runs) == len(values)
