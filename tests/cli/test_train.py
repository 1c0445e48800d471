"""`shardwise train` as a user runs it: stopped, killed and started again, it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.running import does_not_fit_line, error_line, run, run_json
from launch.warm import warm_ranks
from shardwise.launch.outcome import DONE, FAILED, MISTAKE, STOPPED, Attempt, Failure, Outcome
from shardwise.launch.run import Launch
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.metrics.lines import read_lines
from shardwise.training.checkpoint.shards import ShardReader
from training.runs import job_of, write_shards

ROOT = Path(__file__).resolve().parents[2]


def start(job: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", "train", str(job), "--run-folder", str(folder), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(reached: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    return max((one["step"] for one in read_lines(folder / "metrics.jsonl")), default=-1)


def process_of_rank(parent: int, rank: int) -> int:
    """The process with that rank among all that were started by ``parent``."""
    wanted = {f"SHARDWISE_LAUNCHER={parent}".encode(), f"RANK={rank}".encode()}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"rank {rank} is not there")


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint."""
    path = CheckpointFolder(folder / "checkpoints").of_step(step)
    manifest, reader = read_manifest(path), ShardReader(path)
    found = {}
    for key, whole in manifest.tensors.items():
        for piece in whole.pieces:
            everything = tuple(slice(0, size) for size in piece.box.shape)
            value = reader.slice_of(piece.file, piece.entry, piece.box.shape, everything)
            found[f"{key} {piece.box.start}"] = value.numpy().tobytes()
    return found


def job_in(folder: Path, steps: int) -> Path:
    settings: dict[str, Any] = {"steps": steps, "checkpoints": {"steps": 4}, "schedule": {"warmup": 3}}
    evaluation = {"interval": steps // 2, "batches": 1}
    job = job_of(write_shards(folder / "words"), 2, run={**settings, "evaluation": evaluation}, dp=2, zero=1)
    (folder / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")
    return folder / "job.yaml"


def ended(process: subprocess.Popen[str], status: int = DONE) -> str:
    """What a run said that has ended, well if nothing else is expected."""
    output, _ = process.communicate(timeout=200)
    assert process.returncode == status, output
    return output


def require_equal(broken: Path, whole: Path, steps: int) -> None:
    """Every tensor and every figure that is not a time, bit for bit; no step is told twice."""
    assert tensors(broken, steps) == tensors(whole, steps)
    records = [list(read_lines(folder / "metrics.jsonl")) for folder in (whole, broken)]
    assert [one["step"] for one in records[1] if "loss" in one] == list(range(1, steps + 1))
    for name in ("loss", "gradient_norm", "learning_rate", "validation_loss"):
        at_once, again = ([one[name] for one in lines if name in one] for lines in records)
        assert at_once == again


def test_stopped_and_started_again_it_ends_as_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is stopped is a command of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job, whole, broken = job_in(tmp_path, 10), tmp_path / "whole", tmp_path / "broken"
    # Steps that are recorded are the same bits, whatever happens between them.
    with warm_ranks():
        at_once = run("train", str(job), "--run-folder", str(whole), "--profile", "steps=4:6")
    assert at_once.status == 0 and "Predicted beside measured" in at_once.out, at_once
    parts = run_json("compare", str(whole), "--json")["parts"]
    assert {"compute", "dp", "optimizer", "data", "checkpoint"} <= {name for name in parts if parts[name]["measured"]}
    first = start(job, broken)
    wait_until(lambda: last_step(broken) >= 2, first)
    os.kill(process_of_rank(first.pid, 1), signal.SIGTERM)  # whoever is told: all stop
    output = ended(first, STOPPED)
    step = CheckpointFolder(broken / "checkpoints").committed()[0]
    assert 2 <= step < 10 and f"Stopped at step {step} of 10: the same command resumes from there" in output, output
    assert "start the same command again to resume" in run("status", str(broken)).out
    with warm_ranks():
        again = run("train", str(job), "--run-folder", str(broken))
    assert again.status == 0, again
    require_equal(broken, whole, 10)


@pytest.mark.slow
def test_killed_on_the_way_it_ends_as_in_one_go(tmp_path: Path) -> None:
    job, whole, broken = job_in(tmp_path, 20), tmp_path / "whole", tmp_path / "broken"
    ended(start(job, whole))
    process = start(job, broken)
    wait_until(lambda: last_step(broken) >= 10, process)
    os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
    output = ended(process)
    assert "rank 1" in output
    assert "SIGKILL" in output
    require_equal(broken, whole, 20)


SMALL = (
    *("--model", "tiny", "--cluster", "laptop:2", "--dp", "2"),
    *("--seq", "32", "--global-batch", "4", "--precision", "fp32"),
)
OFFLOADED = ["--set", "strategy.offload={optimizer: 1, target: nvme, folder: /no/where}"]


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "run" / "checkpoints").locked():
        line = error_line(run("train", *SMALL, "--run-folder", str(tmp_path / "run")))
    assert f"process {os.getpid()} is training in it" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps: 0 is below 1"),
        (["--grace", "soon"], "--grace: 'soon' is not a quantity"),
        (["--set", "run.schedule.warmup=2000"], "run.schedule.warmup: 2000 steps in a run of 1000"),
        (["--set", "training.tokens=1e6", "--set", "run.schedule.warmup=7813"], "7813 steps in a run of 7813"),
        (["--set", "training.tokens=1e6", "--steps", "9k"], "--steps: 9,000 of 128 tokens are not the 1,000,000 of"),
        (["--set", "training.tokens=1e6", "--set", "run.steps=many"], "run.steps: 'many' is not"),
        (["--set", "run.data.weights=[1]"], "run.data.weights: 1 weights for 0 shards"),
        (["--cluster", "laptop:512", "--dp", "512", "--global-batch", "512"], "512 processes on"),
        (["--set", "run.data.stage=memory", "--set", "run.data.stage_limit=1kB"], "more than stage_limit allows"),
        (["--set", "run.data.stage=memory", "--set", "run.data.validation=[/no]"], "/no.idx: is not there"),
        (OFFLOADED, "strategy.offload.folder: /no/where: No such file or directory; make it"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_one_line_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    line = error_line(run("train", *SMALL, "--run-folder", str(tmp_path / "run"), *arguments))
    assert said in line
    assert not (tmp_path / "run").exists()


def test_what_a_run_cannot_write_is_said_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl: cannot be written" in error_line(run("train", *SMALL, "--run-folder", str(folder)))
    (folder / "metrics.jsonl").rmdir()
    (folder / "tensorboard").touch()
    assert "tensorboard: cannot be written" in error_line(run("train", *SMALL, "--run-folder", str(folder)))


def test_shards_that_have_no_room_where_they_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    staged = ["--set", "run.data.stage=memory", "--run-folder", str(tmp_path / "run")]
    assert "of shards, and 1,000 B are free in /dev/shm" in error_line(run("train", *SMALL, *staged))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt2-xl"], "double pp to 2 and halve dp to 1: that needs 12.6 GiB"),
        (["--model", "gpt2-xl", "--cluster", "laptop:1", "--dp", "1"], "the least that fits: strategy.offload: {opt"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    line = does_not_fit_line(run("train", *SMALL, "--run-folder", str(tmp_path / "run"), *arguments))
    assert said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize("mistake", [False, True])
def test_a_failure_is_told_with_and_without_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: bool
) -> None:
    failure = Failure(1, "raised", "run.data: is damaged", "step", 3, mistake=mistake)
    outcome = Outcome(MISTAKE if mistake else FAILED, False, (Attempt(tmp_path, 1.0, failure),))
    monkeypatch.setattr(Launch, "supervised", lambda self, on_event: outcome)
    for flags in ((), ("--json",)):
        found = run("train", *SMALL, "--run-folder", str(tmp_path / "run"), *flags)
        assert found.status == outcome.status
        assert found.err.count("run.data: is damaged") == 1
    assert json.loads(found.out)["failure"] == "run.data: is damaged"
