"""Before a run whose microbatch is `auto`: one step with the planner's choice, or with the next smaller if need be."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.launch.local import supervise
from shardwise.launch.outcome import Failure
from shardwise.planner.automatic import ways_to_fit
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.train.run_folder import RunFolder

MODULE = "shardwise.train.dry_step"
_SHORT = ("OutOfMemory", "out of memory", "allocate memory", "MemoryError")


def confirmed(job: Job, folder: RunFolder, tell: Callable[[str], None]) -> Job:
    """The job with the largest microbatch of which one step fits; as it is where it leaves none open.

    A run that goes on keeps what was found when it began.
    """
    if "microbatch" not in job.run.automatic:
        return job
    before = _found_before(job, folder)
    if before is not None:
        return before
    return _first_that_fits(ways_to_fit(job), RunFolder(folder.path / "dry-step"), tell)


def _first_that_fits(ways: Sequence[Job], folder: RunFolder, tell: Callable[[str], None]) -> Job:
    for job in ways:
        problem = _short_of(job, folder)
        if problem is None:
            tell(f"microbatch {job.strategy.microbatch}: a dry step fits")
            return job
        tell(f"microbatch {job.strategy.microbatch}: {problem}")
    raise SpecError("strategy.microbatch", f"not even {job.strategy.microbatch} fits: {problem}", "`shardwise plan`")


def _short_of(job: Job, folder: RunFolder) -> str | None:
    """Why one step of the job does not fit its devices."""
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    folder.job.write_text(job.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", MODULE, str(folder.path.resolve())]
    outcome = supervise(command, job.strategy.world, folder.attempts, timeouts=job.run.timeouts, restarts=0)
    if outcome.stopped:
        raise SystemExit(outcome.status)
    if outcome.failure is not None:
        if _is_short(outcome.failure):
            return f"out of memory, {outcome.failure}"
        raise SpecError("strategy.microbatch", f"the dry step failed: {outcome.failure}", f"see {outcome.failure.log}")
    peak = json.loads(folder.peak.read_text(encoding="utf-8"))["peak_bytes"]
    device = job.cluster.device
    room = device.usable_memory - device.framework_memory
    return None if peak <= room else f"a step takes {readable_bytes(peak)} of {readable_bytes(room)}"


def _is_short(failure: Failure) -> bool:
    """A system without memory kills, or says so in its own words."""
    return failure.cause == "killed" or any(words in failure.reason for words in _SHORT)


def _found_before(job: Job, folder: RunFolder) -> Job | None:
    if not folder.job.exists() or not folder.checkpoints.committed():
        return None
    before = Job.from_dict(read_yaml(folder.job, "job file"))
    found = {"microbatch": before.strategy.microbatch, "offload": before.strategy.offload}
    same = replace(before.strategy, microbatch=job.strategy.microbatch, offload=job.strategy.offload) == job.strategy
    if not same or before.run.automatic != job.run.automatic or before.cluster != job.cluster:
        return None
    return job.with_strategy(**found)
