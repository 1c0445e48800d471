"""`shardwise checkpoint`: what a checkpoint holds, damage named, and the same state in other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.running import error_line, run, run_json
from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.report.status import contents_page
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import Manifest, contents_of, read_manifest
from shardwise.spec import Job
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import Saver
from shardwise.training.checkpointing import start_from
from training.runs import boxes, whole


def job(devices: int, **strategy: Any) -> Job:
    training = {"global_batch": 8, "seq": 32, "precision": "fp32"}
    return Job.from_dict({"model": "tiny", "cluster": f"laptop:{devices}", "strategy": strategy, "training": training})


def saved(one: Job, folder: str) -> dict[str, Any]:
    """Two checkpoints of a run, the second with some state in the optimizer."""
    import torch

    engine = Engine(one, seed=3)
    generator = torch.Generator().manual_seed(engine.mesh.rank("dp"))
    saver = Saver(engine, CheckpointFolder(Path(folder) / "checkpoints"))
    saver.save(1, {"data": {"batch": 1, "left_out": [], "sequences": 8}, "losses": []}, wait=True)
    for parameter in engine.parameters:
        for state in engine.optimizer.state[parameter.parameter].values():
            getattr(state, "_local_tensor", state).copy_(
                torch.rand(getattr(state, "_local_tensor", state).shape, generator=generator)
            )
    data = {"batch": 7, "left_out": [3], "sequences": 8}
    saver.save(2, {"data": data, "losses": [3.5, 3.25]}, wait=True)
    saver.finish()
    return {"boxes": boxes(engine)}


def loaded(one: Job, folder: str) -> dict[str, Any]:
    engine = Engine(one, seed=4)
    load(engine, Path(folder))
    return {"boxes": boxes(engine)}


def started(one: Job, folder: str) -> dict[str, Any]:
    engine = Engine(one, seed=4)
    start_from(engine, Path(folder))
    return {"boxes": boxes(engine)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run on two ranks that share every tensor, and what it held at its end."""
    folder = tmp_path_factory.mktemp("run")
    return folder, whole(on_ranks(2, saved, job(2, dp=2, zero=3), str(folder)))


@pytest.fixture
def run_folder(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def test_inspect(made: tuple[Path, dict[str, Any]]) -> None:
    folder, tensors = made
    for path in (folder, folder / "checkpoints", folder / "checkpoints" / "step-00000002"):
        found = run_json("checkpoint", "inspect", str(path))
        assert (found["step"], found["model"], found["layout"]["zero"]) == (2, "tiny", 3)
        assert found["tensors"] == len(tensors)
    weights = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith("weight/"))
    assert found["bytes"] == {"weight": weights, "exp_avg": weights, "exp_avg_sq": weights}
    assert len(found["files"]) == 2
    assert found["numbers"]["data"]["batch"] == 7
    text = run("checkpoint", "inspect", str(folder), "--tensors").out
    for words in ("dp 2", "zero 3", "weights", "exp_avg_sq", "batch 7 is next", "3.25", "layers.0.attention.query"):
        assert words in text


def test_inspect_shows_what_the_layout_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # the table must not fold, however long the folder's name is
    layout = {"dp": 2, "tp": 1, "zero": 1, "order": ["tp", "dp"], "offload": {"optimizer": 0.5}}
    scale = {"scale": 1024.0, "growth_tracker": 3.0}
    job = {"model": "tiny", "strategy": layout, "training": {"precision": "fp16"}}
    (tmp_path / "manifest.json").write_bytes(Manifest(1, job, {"loss_scale": scale}, {}).to_bytes())
    contents_page(contents_of(tmp_path), each_tensor=False).print()
    text = capsys.readouterr().out
    assert "dp 2, zero 1, order tp,dp, offload {optimizer: 0.5}" in text
    assert "scale 1024, growth_tracker 3" in text


def test_verify_names_what_is_damaged(run_folder: Path) -> None:
    result = run("checkpoint", "verify", str(run_folder))
    assert (result.status, result.out.count("all checksums match")) == (0, 2)
    first, second = (run_folder / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    shard = first / "shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 4
    shard.write_bytes(raw)
    result = run("checkpoint", "verify", str(run_folder))
    good, bad = result.out.splitlines()
    assert result.status == 1
    assert "step-00000002" in good and "all checksums match" in good
    assert f"{shard}: is damaged: its checksum differs" in bad
    assert run("checkpoint", "verify", str(second)).status == 0
    (second / "manifest.json").unlink()
    assert "manifest.json: cannot be read" in run("checkpoint", "verify", str(run_folder)).out


@pytest.mark.parametrize(("before", "after"), [('"step": 2', '"step": 3'), ("[0, 0]", "[1, 0]"), ("3.25", "3.75")])
def test_a_manifest_with_one_changed_figure_is_damaged(run_folder: Path, before: str, after: str) -> None:
    path = run_folder / "checkpoints" / "step-00000002" / "manifest.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    result = run("checkpoint", "verify", str(path.parent))
    assert result.status == 1
    assert "manifest.json: is damaged" in result.out or "does not describe a checkpoint" in result.out
    error_line(run("checkpoint", "inspect", str(path.parent)))


@pytest.mark.parametrize("shards", [1, 3])
def test_reshard_keeps_every_bit(made: tuple[Path, dict[str, Any]], tmp_path: Path, shards: int) -> None:
    folder, expected = made
    out = tmp_path / "out"
    result = run("checkpoint", "reshard", str(folder), "--out", str(out), "--shards", str(shards))
    assert result.status == 0, result.err
    target = out / "step-00000002"
    manifest = read_manifest(target)
    assert manifest.numbers == read_manifest(folder / "checkpoints" / target.name).numbers
    assert all(len(one.pieces) == 1 for one in manifest.tensors.values())
    sizes = [shard.size for shard in manifest.files.values()]
    assert len(sizes) == shards and max(sizes) < 1.2 * min(sizes)
    assert run("checkpoint", "verify", str(out)).status == 0
    for layout in ({"devices": 1}, {"devices": 4, "tp": 2, "pp": 2}):
        found = whole(on_ranks(layout["devices"], loaded, job(**layout), str(target)))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_weights_alone_are_started_from(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = made
    out = str(tmp_path / "out")
    assert run("checkpoint", "reshard", str(folder), "--out", out, "--shards", "2", "--weights-only").status == 0
    assert set(run_json("checkpoint", "inspect", out)["bytes"]) == {"weight"}
    found = whole(on_ranks(2, started, job(2, tp=2), out))
    weights = [key for key in expected if key.startswith("weight/")]
    assert weights and all(np.array_equal(found[key], expected[key]) for key in weights)


def test_mistakes_are_one_line(run_folder: Path, tmp_path: Path) -> None:
    source, out = str(run_folder), str(tmp_path / "out")
    reshard = ("checkpoint", "reshard", source)
    assert run(*reshard, "--out", out, "--shards", "1").status == 0
    assert "is already there" in error_line(run(*reshard, "--out", out, "--shards", "1"))
    assert "a tensor stays whole" in error_line(run(*reshard, "--out", out + "2", "--shards", "9999"))
    assert "--shards" in error_line(run(*reshard, "--out", out, "--shards", "0"))
    assert "--out" in error_line(run(*reshard, "--shards", "2"))
    assert "holds no checkpoint" in error_line(run("checkpoint", "inspect", str(tmp_path)))
    assert "is not a folder" in error_line(run("checkpoint", "verify", str(tmp_path / "absent")))
    assert "is not a path" in error_line(run("checkpoint", "verify", "x" * 4000))
    for what, flag in (
        ("verify", "--csv"),
        ("verify", "--tensors"),
        ("inspect", "--weights-only"),
        ("reshard", "--csv"),
    ):
        assert f"{flag}: is for checkpoint" in error_line(run("checkpoint", what, str(tmp_path), flag))
    shard = run_folder / "checkpoints" / "step-00000002" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "bytes instead of" in error_line(run(*reshard, "--out", out + "3", "--shards", "2"))
    assert not Path(out + "2").exists() and not Path(out + "3").exists()


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (b"model: [tiny\nrun: {", "malformed YAML: "),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"", "it is not a job"),
        (b"run: {checkpoints: {folder: [1]}}", "run.checkpoints.folder is [1]"),
    ],
    ids=repr,
)
def test_a_damaged_job_file_of_a_run_is_one_line(tmp_path: Path, text: bytes, how: str) -> None:
    (tmp_path / "job.yaml").write_bytes(text)
    small = ("--model", "tiny", "--cluster", "laptop:1", "--seq", "32", "--global-batch", "4", "--precision", "fp32")
    for verb in (("checkpoint", "inspect", str(tmp_path)), ("train", *small, "--run-folder", str(tmp_path))):
        result = run(*verb)
        assert result.status == 2 and result.out == "", result
        line = result.err.splitlines()[-1]
        assert line.startswith(f"shardwise: error: {tmp_path}/job.yaml: is damaged: ") and how in line, line
        assert line.endswith("; remove it; `shardwise train` writes it anew")
    assert [one.name for one in tmp_path.iterdir()] == ["job.yaml"] and (tmp_path / "job.yaml").read_bytes() == text
    names_none = run("train", *small, "--run-folder", str(tmp_path / "new"), "--set", "run.checkpoints.folder=s3://")
    assert names_none.status == 2 and "'s3://' names no bucket; write it like s3://bucket/run" in names_none.err


def test_a_full_disk_leaves_nothing(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The disk says no in the middle of a file, or has too little before it begins."""
    from unittest import mock

    from shardwise.training.checkpoint import full_tensors, shards

    written = []

    def full(file: int, block: memoryview) -> None:
        written.append(len(block))
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    arguments = ("checkpoint", "reshard", str(made[0]), "--out", str(out), "--shards", "2")
    with mock.patch.object(shards, "write_block", full):
        assert "No space left on device" in error_line(run(*arguments))
    assert len(written) == 2
    assert [path.name for path in out.iterdir()] == [".lock"]
    with mock.patch.object(full_tensors.shutil, "disk_usage", return_value=mock.Mock(free=1000)):
        assert "are to be written" in error_line(run(*arguments))
    assert json.loads(run(*arguments, "--json").out)["tensors"] > 0
