"""The launch targets by name. A target that `starts` ranks supervises them; the others write a file to submit.

A target that `writes` shares this machine's storage, where the run is prepared; one that `renders` a manifest does not,
and puts the job file into it. A new target is a row here and a module with `start_on(request)`, or with
`write_for(request, ...)` and, if its file can be submitted from here, `submitted(written)` and
`run_command(request, command)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardwise.launch.local import Layouts, StartRanks
from shardwise.launch.targets.host_file import read_hosts
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_text
from shardwise.spec.job import Job


@dataclass(frozen=True)
class LaunchTarget:
    """``module`` is imported when the target is chosen."""

    name: str
    what: str
    kind: Literal["starts", "writes", "renders"]
    module: str


HOSTS = LaunchTarget(
    "FILE", "hosts over ssh, one in a line: `host slots=8`", "starts", "shardwise.launch.targets.host_target"
)
TARGETS = {
    target.name: target
    for target in (
        LaunchTarget(
            "slurm", "a script for sbatch, which --submit submits", "writes", "shardwise.launch.targets.slurm"
        ),
        LaunchTarget("ray", "a Ray cluster, or one of this machine", "starts", "shardwise.launch.ray.target"),
        LaunchTarget(
            "kubernetes", "manifests for Kubeflow Trainer or JobSet", "renders", "shardwise.launch.targets.kubernetes"
        ),
        LaunchTarget("skypilot", "a task for SkyPilot", "renders", "shardwise.launch.targets.skypilot"),
    )
}
_DEVICES = ("cpu", "cuda")  # the meaning of `--on` in earlier versions


@dataclass(frozen=True)
class TargetRequest:
    """A job whose ranks are to be started on a target."""

    named: str  # the target, as the user gave it
    job: Job
    folder: Path | None = None  # of a run; None for other commands
    ray_address: str | None = None


class SubmittedJob(Protocol):
    """A job in a queue."""

    number: str

    def wait(self) -> int:
        """Its exit status, once it has ended."""


class StartsRanks(Layouts, Protocol):
    """A target that starts ranks: `start` starts one attempt; ``notes`` are for the user."""

    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def start(self) -> StartRanks: ...


@dataclass(frozen=True)
class Written:
    """A file to submit by ``command``."""

    path: Path
    command: tuple[str, ...]


def target_named(text: str) -> LaunchTarget:
    """The target, or a file of hosts; raises SpecError for any other name."""
    if not isinstance(text, str):
        raise SpecError("--on", f"{shown(text)} is not a launch target", f"use {', '.join(TARGETS)}")
    if text in TARGETS:
        return TARGETS[text]
    if "\0" not in text and Path(text).is_file():
        return HOSTS
    if text in _DEVICES:
        remedy = f"say --run-device {text}; `train` takes its device from the job (--set run.device={text})"
        raise SpecError("--on", f"{text} is a device, not a launch target", remedy)
    if "/" in text or "." in text:
        raise SpecError("--on", f"there is no file of hosts {shown(text)}", "write one host in a line: `host slots=8`")
    remedy = f"name a file of hosts, or {', '.join(TARGETS)}"
    raise SpecError("--on", f"{shown(text)} is not a launch target", remedy)


def hosts_named(target: LaunchTarget, named: str) -> list[str] | None:
    """The hosts of a host file, in its order; None if a manager chooses the hosts."""
    if target is not HOSTS:
        return None
    return [host.address for host in read_hosts(read_text(named, "file of hosts", errors="replace"), named)]


def started_on(target: LaunchTarget, request: TargetRequest) -> AbstractContextManager[StartsRanks]:
    """Checks the hosts of a target that `starts`, before any rank starts."""
    started: AbstractContextManager[StartsRanks] = importlib.import_module(target.module).start_on(request)
    return started


def submitted(target: LaunchTarget, written: Written) -> SubmittedJob:
    job: SubmittedJob = importlib.import_module(target.module).submitted(written)
    return job


def command_status(target: LaunchTarget, request: TargetRequest, command: Sequence[str]) -> int:
    """Runs a command as the job's ranks, on a target that `writes` but can also run one; its exit status."""
    run = getattr(importlib.import_module(target.module), "run_command", None)
    if run is None:
        raise SpecError("--on", f"{target.name} only writes a file for `train`", "name a file of hosts, or slurm")
    status: int = run(request, command)
    return status


def written_for(target: LaunchTarget, request: TargetRequest, **options: Any) -> Written:
    if request.job.run.restarts.shrink:
        problem = f"a script for {target.name} starts as many ranks as the job has"
        raise SpecError("run.restarts.shrink", problem, "leave it out")
    if request.job.run.checkpoints.memory is not None:
        problem = f"a script for {target.name} starts ranks, and no process beside them that keeps the copies"
        raise SpecError("run.checkpoints.memory", problem, "leave it out")
    if request.job.run.recut is not None:
        raise SpecError("run.recut", f"a script for {target.name} has no launcher to re-cut the stages", "leave it out")
    written: Written = importlib.import_module(target.module).write_for(request, **options)
    return written
