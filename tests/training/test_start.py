"""A run that starts from other weights: a Hugging Face folder, a checkpoint, a run; in any layout."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.running import error_line, run
from engine.workers import on_ranks
from shardwise.spec import Job
from training.runs import boxes, job_of, whole, write_shards

WEIGHTS = "weight/"


def started(job: Job, source: str) -> dict[str, Any]:
    """This rank's tensors after it has started from there."""
    from shardwise.engine.engine import Engine
    from shardwise.training.checkpointing import start_from

    engine = Engine(job, seed=5)
    start_from(engine, Path(source))
    return {"boxes": boxes(engine)}


def exported(job: Job, folder: str) -> dict[str, Any]:
    """Writes the model of one process as a Hugging Face folder, and a checkpoint beside it."""
    from shardwise.engine.engine import Engine
    from shardwise.models.huggingface import write_folder
    from shardwise.run.checkpoint.folder import CheckpointFolder
    from shardwise.training.checkpoint.save import Saver

    engine = Engine(job, seed=1)
    (stage,) = engine.stages.values()
    write_folder(Path(folder) / "hf", job.model, stage.named_parameters())
    numbers = {"data": {"batch": 0, "left_out": [], "sequences": 8}, "losses": []}
    saver = Saver(engine, CheckpointFolder(Path(folder) / "checkpoints"))
    saver.save(0, numbers, wait=True)
    saver.finish()
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


def kept_names(job: Job) -> dict[str, Any]:
    """What this rank asks of a checkpoint."""
    from shardwise.engine.engine import Engine
    from shardwise.training.checkpoint.state import state_tensors

    return {one.saved_as: one.shape for one in state_tensors(Engine(job)) if not one.optional}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("model", "optimizer", "strategy"),
    [
        ("tiny", "adamw", {"pp": 2}),
        ("tiny", "muon", {"zero": 1}),
        ("tiny", "sgd", {"tp": 2}),
        ("tiny-moe", "adamw", {"ep": 2}),
        ("tiny", "sgd-momentum", {"synchronise": "local-sgd"}),
        ("tiny", "adamw", {"synchronise": "diloco"}),
        ("tiny", "adamw", {"synchronise": {"method": "async", "staleness": 2}}),
    ],
    ids=str,
)
def test_what_is_asked_for_before_a_run_is_what_its_ranks_read(
    model: str, optimizer: str, strategy: dict[str, Any]
) -> None:
    from shardwise.training.checkpoint.load import tensors_of

    training = {"global_batch": 4, "seq": 32, "precision": "fp32", "optimizer": optimizer}
    job = Job.from_dict({"model": model, "cluster": "laptop:2", "strategy": strategy, "training": training})
    read: dict[str, Any] = {}
    for one in on_ranks(2, kept_names, job):
        read |= one
    assert tensors_of(job) == read


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder, and a run that was saved at step 0."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(1, exported, job_of(write_shards(folder / "words")), str(folder))
    return folder


FLAGS = ("--model", "tiny", "--cluster", "laptop:1", "--seq", "32", "--global-batch", "8", "--precision", "fp32")


def refused(folder: Path, *arguments: str) -> str:
    """Why a run is refused, in one line, before a process has started."""
    flags = (*FLAGS, "--data", str(folder / "words"), "--set", "run.data.held_out=0.2")
    return error_line(run("train", *flags, "--run-folder", str(folder / "new"), *arguments))


@pytest.mark.parametrize(
    ("source", "changes", "said"),
    [
        (
            "hf",
            "model.qkv_bias=true",
            "attention.key.bias has no place in {}/hf, and the shape [32] in the job's",
        ),
        ("hf", "model.head_dim=16", "key.weight has the shape [32, 64] in {}/hf, and the shape [64, 64] in the job's"),
        ("checkpoints", "model.qkv_bias=true", "has no weight of layers.0.attention.query.bias; use the model that"),
        ("checkpoints", "model.head_dim=16", "query.weight has the shape [64, 64], this model's is [128, 64]"),
    ],
)
def test_weights_of_another_model_are_refused_before_a_process_starts(
    saved: Path, source: str, changes: str, said: str
) -> None:
    assert said.format(saved) in refused(saved, "--set", f"run.start_from={saved / source}", "--set", changes)


def test_weights_that_are_not_all_there_are_refused_before_a_process_starts(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    for name, said in (("hf", "cannot be read"), ("checkpoints", "has 1,000 bytes instead of")):
        source = tmp_path / "copy" / name
        for file in source.rglob("*.safetensors"):
            os.truncate(file, 1000)
        assert said in refused(saved, "--set", f"run.start_from={source}")
    for file in (tmp_path / "copy" / "hf").glob("*.safetensors*"):
        file.unlink()
    assert "model.safetensors: is not in" in refused(saved, "--set", f"run.start_from={tmp_path / 'copy' / 'hf'}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("training.optimizer=sgd-momentum",), "has no momentum_buffer of embedding.weight; use its optimizer"),
        (("strategy.synchronise=diloco",), "has no outer_weight of embedding.weight; use its optimizer and strategy.s"),
    ],
)
def test_a_run_that_lacks_states_is_refused_before_a_process_starts(
    saved: Path, tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "run" / "checkpoints")
    flags = [word for one in changes for word in ("--set", one)]
    found = run(
        "train", *FLAGS, "--cluster", "laptop:2", "--data", str(saved / "words"), "--set", "run.data.held_out=0.2",
        "--run-folder", str(tmp_path / "run"), "--go-on", *flags,
    )  # fmt: skip
    assert found.status == 2 and said in found.err and "started" not in found.err


def test_a_run_does_not_go_on_from_weights_alone(saved: Path) -> None:
    folder = saved / "alone"
    assert run("convert", str(saved), "--to", "checkpoint", "--out", str(folder / "checkpoints")).status == 0
    assert "holds weights only" in refused(saved, "--run-folder", str(folder))


@pytest.mark.slow
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
