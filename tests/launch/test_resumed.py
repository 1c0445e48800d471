"""A folder that has a run already: the same job goes on, or is done; another one is refused, or goes elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.launch.outcome import Commit
from shardwise.launch.resume import folder_for, record_data, require_same_run
from shardwise.launch.run import Launch
from shardwise.run.checkpoint.folder import CheckpointFolder, RunFolder
from shardwise.run.checkpoint.manifest import Manifest
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from training.runs import job_of, write_shards

FLAGS = ("--model", "tiny", "--cluster", "laptop:2", "--seq", "32", "--global-batch", "4", "--precision", "fp32")


def job_with(**changes: dict[str, Any]) -> Job:
    fields: dict[str, Any] = {
        "model": "tiny",
        "cluster": "laptop:2",
        "training": {"seq": 32, "global_batch": 4, "precision": "fp32"},
    }
    return Job.from_dict({**fields, **changes})


def commit(folder: CheckpointFolder, step: int, job: Job) -> CheckpointFolder:
    """Saves a run at a step; what is of no matter here is left out."""
    folder.unfinished(step, "1").mkdir(parents=True)
    folder.commit(step, "1", Manifest(step, job.to_dict(), {}, {}).to_bytes())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Of a run that was saved at step 5."""
    return commit(CheckpointFolder(tmp_path / "run" / "checkpoints"), 5, job_with())


def notes(job: Job, folder: CheckpointFolder, *, go_on: bool = False) -> list[str]:
    return require_same_run(job, RunFolder(folder.path.parent), go_on=go_on)


SHORT = {"seq": 32, "global_batch": 4, "precision": "fp32"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster": "laptop:4"},
        {"strategy": {"tp": 2}},
        {"run": {"steps": 2000, "data": {"prefetch": 3}, "logging": {"interval": 7}}},
    ],
)
def test_layout_and_length_may_change(changes: dict[str, Any], folder: CheckpointFolder) -> None:
    assert notes(job_with(**changes), folder) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {**SHORT, "precision": "bf16"}}, "training.precision is 'bf16', and was 'fp32'"),
        (
            {"training": {**SHORT, "optimization": {"learning_rate": 1e-5}}},
            "training.optimization.learning_rate is 1e-05, and was 0.0003",
        ),
        ({"run": {"schedule": {"kind": "linear"}}}, "run.schedule.kind is 'linear', and was 'cosine'"),
    ],
)
def test_how_it_is_learned_may_change_and_is_told(changes: dict[str, Any], said: str, folder: CheckpointFolder) -> None:
    (note,) = notes(job_with(**changes), folder)
    assert note == f"{said} when this run was saved: it continues from there"


ANOTHER: list[tuple[dict[str, Any], str, str]] = [
    ({"run": {"data": {"shards": ["/b", "/c"]}}}, "run.data.shards", "/b, /c, {} not given"),
    ({"run": {"data": {"held_out": 0.1}}}, "run.data.held_out", "0.1, {} 0.02"),
    ({"run": {"start_from": "/x"}}, "run.start_from", "'/x', {} not given"),
    ({"training": {**SHORT, "seq": 64}}, "training.seq", "64, {} 32"),
    ({"training": {**SHORT, "global_batch": 8}}, "training.global_batch", "8, {} 4"),
    (
        {"training": {**SHORT, "adapters": {"rank": 8, "dropout": 0.1}}},
        "training.adapters",
        "rank: 8, dropout: 0.1, {} not given",
    ),
    ({"training": {**SHORT, "optimizer": "sgd"}}, "training.optimizer", "'sgd', {} 'adamw'"),
]


@pytest.mark.parametrize(("changes", "field", "said"), ANOTHER)
def test_another_job_is_refused_unless_the_run_is_to_go_on_as_it(
    changes: dict[str, Any], field: str, said: str, folder: CheckpointFolder
) -> None:
    job = job_with(**changes)
    with pytest.raises(SpecError) as refused:
        notes(job, folder)
    assert str(refused.value).startswith(
        f"{field}: is {said.format('but')} in the run in {folder.path.parent}; train it"
    )
    (note,) = notes(job, folder, go_on=True)
    assert note == f"{field} is {said.format('and was')} when this run was saved: it continues from there"


def test_shards_of_the_same_name_with_another_content_are_another_job(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "words")
    job, folder = job_of(shards), RunFolder(tmp_path / "run")
    commit(folder.checkpoints, 5, job)
    record_data(job, folder)
    assert require_same_run(job, folder, go_on=False) == []
    write_shards(tmp_path / "words", seed=1)
    with pytest.raises(SpecError, match=r"run.data.shards: is .*words as it is now, but other content in the run in"):
        require_same_run(job, folder, go_on=False)
    for damaged in ("{", "[]", '{"shards": []}', '{"shards": 1}'):
        folder.data.write_text(damaged)
        assert require_same_run(job, folder, go_on=False) == []


def test_going_on_as_another_job_is_shown_and_the_run_made_ready(folder: CheckpointFolder) -> None:
    path = folder.path.parent
    told = ("--set", "run.data.held_out=10%", "--print-torchrun", "--go-on")
    found = run("train", *FLAGS, "--run-folder", str(path), *told)
    assert found.status == 0, found.err
    assert "note: run.data.held_out is 0.1, and was 0.02 when this run was saved" in found.err
    assert Job.from_yaml((path / "job.yaml").read_text()).run.data.held_out == 0.1


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "run.seed=7"), "run.seed: is 7, but the run in {run} began with 0; use 0, or another folder"),
        (("--set", "model.layers=2"), "model.layers: is 2, but 4 in the run in {run}; train it in another folder"),
        (("--set", "model.numerics.rope_theta=5e5"), "model.numerics: is {'rope_theta': 500000.0}, but not given"),
        (
            ("--seq", "64"),
            "training.seq: is 64, but 32 in the run in {run}; train it in another folder (--run-folder), or continue",
        ),
        (
            ("--steps", "3"),
            "--steps: is 3, and the run in {run} is at step 5; raise the steps to continue it; another folder",
        ),
        (("--set", "run.stop_at=4"), "run.stop_at: is 4, and the run in {run} is at step 5"),
    ],
)
@pytest.mark.parametrize("go_on", [(), ("--go-on",)])
def test_another_run_in_a_folder_that_was_named_is_refused(
    arguments: tuple[str, ...], said: str, go_on: tuple[str, ...], folder: CheckpointFolder
) -> None:
    if go_on and "--seq" in arguments:
        return  # which is what it is for
    path = folder.path.parent
    line = error_line(run("train", *FLAGS, "--run-folder", str(path), *arguments, *go_on))
    assert said.replace("{run}", str(path)) in line
    assert not (path / "job.yaml").exists()


def test_a_run_that_is_done_says_so_and_more_steps_go_on(folder: CheckpointFolder) -> None:
    path = folder.path.parent
    flags = ("train", *FLAGS, "--run-folder", str(path))
    done = run(*flags, "--steps", "5", "--set", "training.optimization.learning_rate=1")
    assert (done.status, (path / "job.yaml").exists(), (path / "attempts").exists()) == (0, False, False)
    assert done.out.startswith(
        f"Nothing to do: the run in {path} is at its last step, 5.\nRaise --steps to continue it"
    )
    assert json.loads(run(*flags, "--steps", "5", "--json").out)["attempts"] == 0
    paused = run(*flags, "--steps", "9", "--set", "run.stop_at=5")
    assert "is at its last step, 5 of 9, where run.stop_at pauses it." in " ".join(paused.out.split())
    assert run(*flags, "--steps", "9", "--print-torchrun").status == 0
    assert Job.from_yaml((path / "job.yaml").read_text()).run.steps == 9


def test_a_run_whose_last_checkpoint_is_damaged_is_not_done(folder: CheckpointFolder) -> None:
    path = folder.path.parent
    (folder.of_step(5) / "manifest.json").write_text("{")
    found = run("train", *FLAGS, "--run-folder", str(path), "--steps", "5", "--print-torchrun")
    assert "torchrun" in found.out


def test_another_job_gets_another_folder_where_none_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("train", *FLAGS, "--steps", "5", "--print-torchrun")
    commit(CheckpointFolder(Path("runs/tiny/checkpoints")), 5, job_with())
    longer = job_with(training={**SHORT, "seq": 64})
    for _ in range(2):  # until it has saved something the folder is free
        found = run(*flags, "--seq", "64")
        said = (
            "note: runs/tiny has the run of another job (training.seq is 64, and was 32): this one is in runs/tiny-2\n"
        )
        assert found.err == said
        assert Job.from_yaml(Path("runs/tiny-2/job.yaml").read_text()).training.seq == 64
    commit(CheckpointFolder(Path("runs/tiny-2/checkpoints")), 5, longer)
    assert "Nothing to do: the run in runs/tiny-2 is" in run(*flags, "--seq", "64").out
    assert "Nothing to do: the run in runs/tiny is" in run(*flags).out
    assert folder_for(job_with(run={"seed": 3}), Path("runs/tiny"))[0] == Path("runs/tiny-3")
    assert not Path("runs/tiny/job.yaml").exists()


def test_a_damaged_checkpoint_says_nothing(folder: CheckpointFolder) -> None:
    (folder.of_step(5) / "manifest.json").write_text("{")
    assert notes(job_with(run={"seed": 7}), folder) == []
    commit(folder, 4, job_with())
    with pytest.raises(SpecError, match="began with 0"):
        notes(job_with(run={"seed": 7}), folder)


def test_progress_is_a_checkpoint_that_was_written_later_not_a_greater_step(folder: CheckpointFolder) -> None:
    """A run that found its newest checkpoint damaged goes on from the one before, to steps that are less."""
    launch = Launch(job_with(), RunFolder(folder.path.parent))
    before = launch._last_commit()
    folder.unfinished(4, "2").mkdir()
    folder.commit(4, "2", Manifest(4, job_with().to_dict(), {}, {}).to_bytes())
    after = launch._last_commit()
    assert (before.step, after.step) == (5, 4)
    assert Commit() < before < after
