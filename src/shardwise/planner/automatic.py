"""Chooses what a job leaves open (`run.automatic`): the largest microbatch that fits, and the least offload needed.

The microbatch is chosen first, with the offload that the job specifies; offload is added only if not even the smallest
microbatch fits. Optimizer states are offloaded first, since they move once a step; then what moves with every
microbatch: gradients and weights where ZeRO has sharded them, and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from shardwise.collectives.cost import check_algorithm
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of, room_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Offload
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes

STEPS = 16  # shares are tried in sixteenths
KINDS = ("optimizer", "gradients", "weights", "activations")


def smallest_offload(job: Job, memory_bytes: float | None = None, kinds: Sequence[str] = KINDS) -> Job:
    """The job with the smallest shares of these ``kinds`` offloaded that make it fit a device, or ``memory_bytes``.

    "Fit" includes the margin that plans leave free. The job's own offload is the minimum. Raises SpecError if
    offloading everything is not enough.
    """
    limit = room_of(job, memory_bytes).planned_bytes
    for kind in (kind for kind in kinds if _may_go(job, kind)):
        least = getattr(job.strategy.offload, kind)
        for share in (least, *(step / STEPS for step in range(1, STEPS + 1) if step / STEPS > least)):
            tried = _with_share(job, kind, share)
            if fit_of(tried, memory_bytes) == "fits":
                return tried
        job = tried
    needed = peak_memory(job).total
    problem = (
        f"a device needs {readable_bytes(needed)} of {readable_bytes(limit)} even with everything possible offloaded"
    )
    raise SpecError("strategy.offload", problem, "plan for another layout, or a smaller microbatch")


def _may_go(job: Job, kind: str) -> bool:
    """Whether a kind can be offloaded: gradients and weights only under ZeRO."""
    if kind in ("optimizer", "activations"):
        return True
    with_optimizer = _with_share(job, "optimizer", 1.0)
    return set(verdict(_with_share(with_optimizer, kind, 1.0)).findings) <= set(verdict(with_optimizer).findings)


def _with_share(job: Job, kind: str, share: float) -> Job:
    changed: dict[str, Any] = {kind: share}
    return job.with_strategy(offload=replace(job.strategy.offload, **changed))


def decided(job: Job) -> Job:
    """The job with what it leaves open chosen by prediction; unchanged if it leaves nothing open.

    Raises SpecError for a collective algorithm that cannot be priced.
    """
    check_algorithm(job.strategy.collective, "strategy.collective")
    return ways_to_fit(job)[0]


def ways_to_fit(job: Job) -> list[Job]:
    """Jobs that fit their devices, best first; each needs less memory than the one before.

    If nothing fits, the smallest job alone: the launcher reports why.
    """
    if not job.run.automatic:
        return [job]
    kinds = [kind for kind in KINDS if kind in job.run.automatic]
    if kinds:
        job = job.with_strategy(offload=_with_target(job))
    sizes = _microbatches(job) if "microbatch" in job.run.automatic else [job]
    fitting = [sized for sized in sizes if fit_of(sized) == "fits"]
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
    jobs = []
    for size in sorted(divisors(most), reverse=True):
        try:
            jobs.append(job.with_strategy(microbatch=size))
        except SpecError:  # an interleaved pipeline takes only some of them
            continue
    return jobs or [job]


def _with_target(job: Job) -> Offload:
    """The offload of the job with its target: unless the job says which, disk on a CPU, whose own memory is full."""
    offload = job.strategy.offload
    target: Literal["cpu", "nvme"] = "nvme" if job.run_device == "cpu" else "cpu"
    return offload if offload != Offload() else replace(offload, target=target)
