"""Runs that go wrong: `shardwise train` with the real launcher and processes, and a worker that fails as it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cli.running import Result, run
from launch.warm import warm_ranks
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.metrics.lines import read_lines
from shardwise.spec import Job
from shardwise.training.checkpoint.load import problems_of
from training.faulty_worker import VARIABLE, Fault, spelled
from training.runs import job_of

TESTS = Path(__file__).resolve().parents[1]
STEPS = 8
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "checkpoints": {"steps": 2, "seconds": None, "keep": 2},
    "evaluation": {"batches": 0},
    "schedule": {"kind": "constant"},
    "timeouts": {"start": 100, "step": 60, "checkpoint": 60},
    "logging": {"tensorboard": True, "memory": 10_000},
}


def small_job(shards: str, devices: int = 2, run: dict[str, Any] | None = None, **strategy: Any) -> Job:
    return job_of(shards, devices, run={**SETTINGS, **(run or {})}, **(strategy or {"dp": devices, "zero": 1}))


@dataclass(frozen=True)
class Ended:
    """How `shardwise train` ended, and the folder it leaves."""

    result: Result
    folder: Path

    @property
    def said(self) -> str:
        return self.result.err

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder / "checkpoints")

    def require(self, status: int, *said: str) -> None:
        assert self.result.status == status, (self.result, self.logs())
        for words in said:
            assert words in self.said, self.said

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("attempts/*/*.log")))

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(self.folder / "metrics.jsonl"))

    def require_whole(self) -> None:
        """Every checkpoint that has a name is as it was written, nothing unfinished is left, no step is told twice."""
        assert not list(self.checkpoints.path.glob("*.part-*"))
        for step in self.checkpoints.present():
            assert not problems_of(self.checkpoints.of_step(step))
        told = [one["step"] for one in self.lines() if "loss" in one]
        assert told == sorted(set(told))


def train(job: Job, folder: Path, *faults: Fault, arguments: tuple[str, ...] = ()) -> Ended:
    """`shardwise train` on this job and folder, in which these faults happen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(job.to_yaml(), encoding="utf-8")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    told = mock.patch.dict(os.environ, {VARIABLE: spelled(*faults), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    with told, warm_ranks(), mock.patch("shardwise.launch.run.WORKER", "training.faulty_worker"):
        return Ended(run("train", str(file), "--run-folder", str(folder), *arguments), folder)


def final_state(folder: Path, step: int = STEPS) -> tuple[Any, ...]:
    """What a run ended with, to the last bit: checksums of its weights and moments, and its position."""
    manifest = read_manifest(folder / "checkpoints" / f"step-{step:08d}")
    return manifest.files, manifest.numbers, manifest.tensors


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A disk of its own at ``folder``; skips the test where this machine lets nobody mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nobody may mount a disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # root may write everywhere, but not on such a disk
        with small_disk(folder, "size=1m,ro"):
            yield
    else:
        yield
