"""Checkpoints beside frozen weights hold only what is trained, under any layout, and belong to one base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.parameters import local
from shardwise.models import Decoder
from shardwise.models.decoder import initialise
from shardwise.models.huggingface import write_folder
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import Adapters
from shardwise.training.checkpoint.load import load, newest_intact, require_resumable
from shardwise.training.checkpoint.save import Saver
from shardwise.training.checkpointing import Position, begin
from training.checkpoint.test_checkpoint import job as plain_job
from training.checkpoint.test_checkpoint import own_share
from training.runs import boxes, whole

DORA = Adapters(rank=4, method="dora")


def base(folder: Path, seed: int, **changes: Any) -> Path:
    model = replace(plain_job().model, **changes)
    decoder = Decoder(model)
    initialise(decoder, seed, model)
    with torch.no_grad():
        write_folder(folder, model, decoder.named_tensors())
    return folder


def job(folder: Path, *, adapters: Adapters | None = DORA, trained: tuple[str, ...] = (), **layout: Any) -> Job:
    one = plain_job(**layout)
    training = replace(one.training, adapters=adapters, trained=trained)
    return replace(one, training=training, run=replace(one.run, start_from=str(folder)))


def train(one: Job, folder: str, steps: int, resume: bool) -> dict[str, Any]:
    engine, place = Engine(one, seed=int(resume)), CheckpointFolder(Path(folder))
    adapters = [held for held in engine.trained if held.name.endswith(".a")]
    begin(engine)
    first = 0
    if resume:
        for held in adapters:  # what the checkpoint does not bring back is seen
            engine.optimizer.write(held.parameter, "master", torch.zeros_like(local(held.parameter)))
        found = newest_intact([place])
        assert found is not None
        first = load(engine, found).step
    losses = [float(engine.step(own_share(one, engine, step)).loss) for step in range(first, first + steps)]
    saver = Saver(engine, place)
    saver.save(first + steps, {"data": Position(batch=first + steps).to_numbers(8), "losses": []}, wait=True)
    saver.finish()
    return {"losses": losses, "boxes": boxes(engine)}


@pytest.mark.slow
def test_adapters_resume_under_another_layout(tmp_path: Path) -> None:
    folder, layout = base(tmp_path / "base", 1), {"devices": 2, "dp": 2, "zero": 3}
    first = on_ranks(4, train, job(folder, devices=4, tp=2, pp=2), str(tmp_path / "a"), 2, False)
    second = on_ranks(2, train, job(folder, **layout), str(tmp_path / "a"), 2, True)
    (alone,) = on_ranks(1, train, job(folder), str(tmp_path / "b"), 4, False)
    assert np.allclose(first[0]["losses"] + second[0]["losses"], alone["losses"], rtol=1e-5)
    expected, found = whole([alone]), whole(second)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert np.abs(found[key] - tensor).max() <= 1e-4 * max(np.abs(tensor).max(), 1e-6), key
    manifest = read_manifest(tmp_path / "a" / "step-00000004")
    assert all(".adapter." in key for key in manifest.tensors) and manifest.tensors


@pytest.mark.slow
def test_the_base_is_read_again_and_another_one_refused(tmp_path: Path) -> None:
    folder, other = base(tmp_path / "base", 1), base(tmp_path / "other", 2)
    one = job(folder, adapters=None, trained=("norms", "layers.1.attention"))
    on_ranks(1, train, one, str(tmp_path / "a"), 1, False)
    kept = CheckpointFolder(tmp_path / "a")
    require_resumable(one, kept)
    for wrong, words in (
        (replace(one, run=replace(one.run, start_from=str(other))), "was trained beside other weights"),
        (replace(one, run=replace(one.run, start_from=None)), "was trained beside other weights"),
        (replace(one, training=replace(one.training, trained=())), "this job trains all of them"),
    ):
        with pytest.raises(SpecError, match=words) as caught:
            require_resumable(wrong, kept)
        assert "\n" not in str(caught.value)
    (text,) = on_ranks(1, refused_when_loaded, job(other), str(tmp_path / "a"))
    assert "other weights" in text
    (text,) = on_ranks(1, refused_as_a_start, plain_job(), str(tmp_path / "a"))
    assert "holds only what was trained" in text


def refused_when_loaded(one: Job, folder: str) -> str:
    engine = Engine(one)
    begin(engine)
    with pytest.raises(SpecError) as caught:
        load(engine, Path(folder) / "step-00000001")
    return str(caught.value)


def refused_as_a_start(one: Job, folder: str) -> str:
    with pytest.raises(SpecError) as caught:
        begin(Engine(replace(one, run=replace(one.run, start_from=folder))))
    return str(caught.value)
