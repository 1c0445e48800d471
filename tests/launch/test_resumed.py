"""A run that is started again as another job: refused, told, or no matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.launch.outcome import Commit
from shardwise.launch.resumed import changes_since_saved
from shardwise.launch.run import Launch
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.train.checkpoint.folder import CheckpointFolder
from shardwise.train.checkpoint.manifest import Manifest
from shardwise.train.run_folder import RunFolder

FLAGS = ("--model", "tiny", "--cluster", "laptop:2", "--seq", "32", "--global-batch", "4", "--precision", "fp32")


def job_with(**changes: dict[str, Any]) -> Job:
    fields: dict[str, Any] = {
        "model": "tiny",
        "cluster": "laptop:2",
        "training": {"seq": 32, "global_batch": 4, "precision": "fp32"},
    }
    return Job.from_dict({**fields, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Of a run that was saved at step 5."""
    found = CheckpointFolder(tmp_path / "run" / "checkpoints")
    found.unfinished(5, "1").mkdir(parents=True)
    found.commit(5, "1", Manifest(5, job_with().to_dict(), {}, {}).to_bytes())
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster": "laptop:4"},
        {"strategy": {"tp": 2}},
        {"training": {"seq": 32, "global_batch": 8, "precision": "bf16"}},
        {"run": {"steps": 2000, "schedule": {"kind": "linear"}, "data": {"prefetch": 3}}},
    ],
)
def test_layout_batch_and_length_may_change(changes: dict[str, Any], folder: CheckpointFolder) -> None:
    assert changes_since_saved(job_with(**changes), folder) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": {"data": {"shards": ["/b", "/c"]}}}, "run.data.shards is /b, /c, and was not given"),
        ({"run": {"data": {"held_out": 0.1}}}, "run.data.held_out is 0.1, and was 0.02"),
        ({"training": {"seq": 64, "global_batch": 4, "precision": "fp32"}}, "training.seq is 64, and was 32"),
    ],
)
def test_other_data_is_told(changes: dict[str, Any], said: str, folder: CheckpointFolder) -> None:
    (note,) = changes_since_saved(job_with(**changes), folder)
    assert note.startswith(said)


def test_what_is_told_is_shown_and_the_run_made_ready(folder: CheckpointFolder) -> None:
    path = folder.path.parent
    told = ("--set", "run.data.held_out=10%", "--print-torchrun")
    found = run("train", *FLAGS, "--run-folder", str(path), *told)
    assert found.status == 0, found.err
    assert "note: run.data.held_out is 0.1, and was 0.02 when this run was saved" in found.err
    assert Job.from_yaml((path / "job.yaml").read_text()).run.data.held_out == 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "run.seed=7"), "run.seed: is 7, but the run in {run} began with 0; use 0, or another folder"),
        (("--set", "model.layers=2"), "model.layers: is 2, but 4 in the run in {run}; train it in another folder"),
        (("--set", "model.numerics.rope_theta=5e5"), "model.numerics: is {'rope_theta': 500000.0}, but not given"),
    ],
)
def test_another_seed_or_model_is_refused(arguments: tuple[str, ...], said: str, folder: CheckpointFolder) -> None:
    path = folder.path.parent
    line = error_line(run("train", *FLAGS, "--run-folder", str(path), *arguments))
    assert said.replace("{run}", str(path)) in line
    assert not (path / "job.yaml").exists()


def test_a_damaged_checkpoint_says_nothing(folder: CheckpointFolder) -> None:
    (folder.of_step(5) / "manifest.json").write_text("{")
    assert changes_since_saved(job_with(run={"seed": 7}), folder) == []
    folder.unfinished(4, "1").mkdir()
    folder.commit(4, "1", Manifest(4, job_with().to_dict(), {}, {}).to_bytes())
    with pytest.raises(SpecError, match="began with 0"):
        changes_since_saved(job_with(run={"seed": 7}), folder)


def test_progress_is_a_checkpoint_that_was_written_later_not_a_greater_step(folder: CheckpointFolder) -> None:
    """A run that found its newest checkpoint damaged goes on from the one before, to steps that are less."""
    launch = Launch(job_with(), RunFolder(folder.path.parent))
    before = launch._last_commit()
    folder.unfinished(4, "2").mkdir()
    folder.commit(4, "2", Manifest(4, job_with().to_dict(), {}, {}).to_bytes())
    after = launch._last_commit()
    assert (before.step, after.step) == (5, 4)
    assert Commit() < before < after
