"""The smallest offload with which a job fits: the remedy for a run that does not fit (`launch.preflight`).

Optimizer states go first, since they move once a step; then what moves with every microbatch: gradients and weights
where ZeRO has divided them, and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of, room_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes

STEPS = 16  # shares are tried in sixteenths
KINDS = ("optimizer", "gradients", "weights", "activations")


def smallest_offload(job: Job, memory_bytes: float | None = None, kinds: Sequence[str] = KINDS) -> Job:
    """The job with the smallest shares of its offload, of these ``kinds``, that fit a device or ``memory_bytes`` of it.

    "Fit" is what a plan means by it: with the margin that it leaves free.

    What the job offloads already is the least it will; raises SpecError if all of everything is not enough.
    """
    limit = room_of(job, memory_bytes).planned_bytes
    for kind in (kind for kind in kinds if _may_go(job, kind)):
        for share in _shares(getattr(job.strategy.offload, kind)):
            tried = _with_share(job, kind, share)
            if fit_of(tried, memory_bytes) == "fits":
                return tried
        job = tried
    needed = peak_memory(job).total
    problem = (
        f"a device needs {readable_bytes(needed)} with everything offloaded that may be, of {readable_bytes(limit)}"
    )
    raise SpecError("strategy.offload", problem, "plan for another layout, or a smaller microbatch")


def _may_go(job: Job, kind: str) -> bool:
    """Gradients and weights leave only under ZeRO."""
    if kind in ("optimizer", "activations"):
        return True
    with_optimizer = _with_share(job, "optimizer", 1.0)
    return set(verdict(_with_share(with_optimizer, kind, 1.0)).findings) <= set(verdict(with_optimizer).findings)


def _shares(least: float) -> list[float]:
    return [least, *(step / STEPS for step in range(1, STEPS + 1) if step / STEPS > least)]


def _with_share(job: Job, kind: str, share: float) -> Job:
    changed: dict[str, Any] = {kind: share}
    return job.with_strategy(offload=replace(job.strategy.offload, **changed))
