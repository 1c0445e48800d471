"""A run that starts from other weights: a Hugging Face folder, a checkpoint, a run; in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.workers import on_ranks
from shardwise.spec import Job
from train.runs import boxes, job_of, whole, write_shards

WEIGHTS = "weight/"


def started(job: Job, source: str) -> dict[str, Any]:
    """This rank's tensors after it has started from there."""
    from shardwise.engine.engine import Engine
    from shardwise.train.start import start_from

    engine = Engine(job, seed=5)
    start_from(engine, Path(source))
    return {"boxes": boxes(engine)}


def exported(job: Job, folder: str) -> dict[str, Any]:
    """Writes the model of one process as a Hugging Face folder, and a checkpoint beside it."""
    from shardwise.engine.engine import Engine
    from shardwise.models.huggingface import write_folder
    from shardwise.train.checkpoint.folder import CheckpointFolder
    from shardwise.train.checkpoint.save import Saver

    engine = Engine(job, seed=1)
    (stage,) = engine.stages.values()
    write_folder(Path(folder) / "hf", job.model, stage.named_parameters())
    numbers = {"data": {"batch": 0, "left_out": [], "sequences": 8}, "losses": []}
    Saver(engine, CheckpointFolder(Path(folder) / "checkpoints")).save(0, numbers, wait=True)
    return {"boxes": boxes(engine)}


def test_weights_come_into_any_layout_and_the_optimizer_is_new(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "words")
    wanted = whole(on_ranks(1, exported, job_of(shards), str(tmp_path)))
    sources = (tmp_path / "hf", tmp_path / "checkpoints" / "step-00000000", tmp_path)
    layouts: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, {"dp": 2, "zero": 3}), (2, {"tp": 2}), (4, {"pp": 2, "tp": 2}),
    )  # fmt: skip
    for source, (devices, strategy) in zip(sources, layouts):
        found = whole(on_ranks(devices, started, job_of(shards, devices, **strategy), str(source)))
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            expected = wanted[key] if key.startswith(WEIGHTS) else np.zeros_like(tensor)
            assert np.array_equal(tensor, expected), (source, key)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "words")
    job = job_of(shards)
    on_ranks(1, exported, job, str(tmp_path))
    other = replace(job, model=replace(job.model, name="wider", ffn=256))
    for source, said in (
        ("hf", "has ffn 192, the job's model has 256"),
        ("checkpoints/step-00000000", "has the shape"),
        ("nowhere", "is not a folder"),
    ):
        with pytest.raises(Exception, match=said):
            on_ranks(1, started, other, str(tmp_path / source))
