"""A run's folder as a user names it, with what was recorded in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.measure.compare.measured import Measured, measured
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.training.profile.record import read_records
from shardwise.training.run_folder import RunFolder

NEWEST = "last"


@dataclass(frozen=True)
class ProfiledRun:
    folder: RunFolder
    job: Job
    measured: Measured


def profiled_run(text: str) -> ProfiledRun:
    """The run in a folder; raises SpecError if there is none, or none that was profiled."""
    folder = run_folder(text)
    job = Job.from_dict(read_yaml(str(folder.job)))
    records = read_records(folder.profile, job.strategy.world)
    if any(len(records[0].groups[name]) != job.strategy.degree(name) for name in job.strategy.order):
        problem = "was recorded with another layout than the run has now"
        raise SpecError(str(folder.profile), problem, "profile it again: --profile steps=10:12")
    return ProfiledRun(folder, job, measured(records, pipelined=job.strategy.pp > 1))


def run_folder(text: str) -> RunFolder:
    """``runs/NAME``, or the newest of ``runs`` for ``runs/last`` where nothing has that name."""
    path = Path(text)
    try:
        if not path.exists() and path.name == NEWEST:
            runs = [one for one in path.parent.glob("*/job.yaml") if one.is_file()]
            path = max(runs, key=lambda one: one.stat().st_mtime, default=path / "job.yaml").parent
        there = (path / "job.yaml").is_file()
    except (OSError, ValueError) as error:
        problem = f"{shown(text)} is not a path ({getattr(error, 'strerror', error)})"
        raise SpecError("", problem, "check it") from None
    if not there:
        raise SpecError(str(path), "is not a run's folder", "name one that `shardwise train` wrote, such as runs/demo")
    return RunFolder(path)
