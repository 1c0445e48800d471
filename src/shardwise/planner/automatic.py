"""What a job leaves to us (`run.automatic`): the largest microbatch that fits, and the least offload that makes it fit.

A microbatch is looked for first, with what the job offloads by itself; where not even the smallest fits, offload is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from shardwise.cost.memory.room import fit_of
from shardwise.planner.offload_share import KINDS, smallest_offload
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Offload


def decided(job: Job) -> Job:
    """The job with what it leaves open set by what is predicted; unchanged where it leaves nothing open."""
    return ways_to_fit(job)[0]


def ways_to_fit(job: Job) -> list[Job]:
    """Jobs that fit their devices, the one to take first; each next one needs less memory.

    Where nothing fits, the smallest job: who starts it says why not.
    """
    if not job.run.automatic:
        return [job]
    kinds = [kind for kind in KINDS if kind in job.run.automatic]
    if kinds:
        job = job.with_strategy(offload=_with_target(job))
    sizes = _microbatches(job) if "microbatch" in job.run.automatic else [job]
    fitting = [one for one in sizes if _fits(one)]
    if fitting or not kinds:
        return fitting or sizes[-1:]
    least = sizes[-1]
    try:
        return [smallest_offload(least, kinds=kinds)]
    except SpecError:
        return [least]


def _microbatches(job: Job) -> list[Job]:
    """The job with every microbatch that divides its batch, the largest first."""
    most = job.training.sequences(job.strategy.data_parallel) // job.strategy.data_parallel
    found = []
    for size in sorted(divisors(most), reverse=True):
        try:
            found.append(job.with_strategy(microbatch=size))
        except SpecError:  # an interleaved pipeline takes only some of them
            continue
    return found or [job]


def _fits(job: Job) -> bool:
    return fit_of(job) == "fits"


def _with_target(job: Job) -> Offload:
    """A CPU's own memory is what is full, so that its states go to disk; unless the job says where."""
    offload = job.strategy.offload
    target: Literal["cpu", "nvme"] = "nvme" if job.run_device == "cpu" else "cpu"
    return offload if offload != Offload() else replace(offload, target=target)
