"""What makes a job fit that does not: a single change, another strategy, offload, or other devices. Each is priced."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import fitting_change, neighbours
from shardwise.planner.advice.missing import what_is_missing
from shardwise.planner.automatic import KINDS, smallest_offload
from shardwise.planner.describe import change_words, strategy_words
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes

SEARCH_SECONDS = 5.0  # for unsolicited advice; `plan` searches longer


def what_would_fit(job: Job) -> str:
    """The nearest that fits by what a plan leaves free; where nothing does, what the least strategy would need."""
    change = fitting_change(job)
    if change is not None:
        return f"{change_words(job.strategy, change.job.strategy)}: that needs {readable_bytes(change.memory.total)}"
    fitting = _by_several_changes(job)
    if fitting is not None:
        return f"for example {strategy_words(fitting.strategy)} ({readable_bytes(peak_memory(fitting).total)})"
    batch = replace(job.training, global_batch=job.sequences)
    # A CPU's own memory is what is full: there nothing is gained by offload to it.
    request = Request(
        job.unchecked(training=batch),
        offload=False if job.run_device == "cpu" else None,
        any_priced=verdict(job).status != "runs",
        time_limit_seconds=SEARCH_SECONDS,
    ).started()
    found = plan(replace(request, offload=False))
    if isinstance(found, Plan):
        return _nearest(job, found)
    offloaded = _with_offload(job)
    if offloaded is not None:
        return offloaded
    if request.offload is None:
        found = plan(replace(request, offload=True))
    if isinstance(found, Plan):
        return _nearest(job, found)
    if found.was_stopped:
        return f"nothing was found in {SEARCH_SECONDS:g} s; `shardwise plan` looks longer"
    return "; ".join(what_is_missing(found, request))


def _by_several_changes(job: Job) -> Job | None:
    """Change after change, each the one that saves most, without offload: a search would take many times as long."""
    status, least_bytes = verdict(job).status, peak_memory(job).total
    while fit_of(job) != "fits":
        priced = [(peak_memory(other).total, other) for other in _alike(job) if verdict(other).status == status]
        saved_bytes, job = min(priced, key=lambda one: one[0], default=(least_bytes, job))
        if saved_bytes >= least_bytes:
            return None
        least_bytes = saved_bytes
    try:
        predict(job)
    except SpecError:  # a group would cut across the network
        return None
    return job


def _alike(job: Job) -> list[Job]:
    return [other for other in neighbours(job) if other.strategy.offload == job.strategy.offload]


def _nearest(job: Job, found: Plan) -> str:
    """The strategy that differs in the fewest fields; of several the quickest."""
    best = min(found.candidates, key=lambda one: (_changes(job.strategy, one.job.strategy), one.step_seconds))
    return f"nearest that fits: {strategy_words(best.job.strategy)} ({readable_bytes(best.memory.total)})"


def _with_offload(job: Job) -> str | None:
    """For where no layout fits by itself. A CPU's own memory is what is full, so that its states go to disk."""
    target: Literal["cpu", "nvme"] = "nvme" if job.run_device == "cpu" else "cpu"
    try:
        wanted = job.with_strategy(offload=replace(job.strategy.offload, target=target))
        fitting = smallest_offload(wanted)
    except SpecError:
        return None
    if verdict(fitting).status != verdict(job).status:
        return None
    offload = fitting.strategy.offload
    shares = ", ".join(f"{kind}: {getattr(offload, kind):g}" for kind in KINDS if getattr(offload, kind))
    needed = readable_bytes(peak_memory(fitting).total)
    return f"the least that fits: strategy.offload: {{{shares}, target: {offload.target}}} ({needed})"


def _changes(one: Strategy, other: Strategy) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Strategy))
