"""What makes a job fit: a single change, another strategy, offload, or other devices, each priced."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import fitting_change, neighbours
from shardwise.layout.views import is_unlike
from shardwise.planner.automatic import KINDS, smallest_offload
from shardwise.planner.describe import change_words, strategy_words
from shardwise.planner.plan import Plan, plan, what_is_missing
from shardwise.planner.request import Request
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes

SEARCH_SECONDS = 5.0  # for advice nobody asked for; `plan` searches longer


def what_would_fit(job: Job) -> str:
    """The nearest strategy that fits with a plan's margin; if none does, what the smallest would need."""
    change = fitting_change(job)
    if change is not None:
        return f"{change_words(job.strategy, change.job.strategy)}: that needs {readable_bytes(change.memory.total)}"
    if is_unlike(job):
        return "give the fullest devices fewer layers (stage_layers), or `shardwise plan`"
    fitting = _by_several_changes(job)
    if fitting is not None:
        return f"for example {strategy_words(fitting.strategy)} ({readable_bytes(peak_memory(fitting).total)})"
    batch = replace(job.training, global_batch=job.sequences)
    # On a CPU host memory is what runs out, so offload to it gains nothing.
    request = Request(
        job.unchecked(training=batch),
        offload=False if job.run_device == "cpu" else None,
        any_priced=verdict(job).status != "runs",
        time_limit_seconds=SEARCH_SECONDS,
    ).started()
    result = plan(replace(request, offload=False))
    if isinstance(result, Plan):
        return _nearest(job, result)
    offloaded = _with_offload(job)
    if offloaded is not None:
        return offloaded
    if request.offload is None:
        result = plan(replace(request, offload=True))
    if isinstance(result, Plan):
        return _nearest(job, result)
    if result.was_stopped:
        return f"nothing was found in {SEARCH_SECONDS:g} s; `shardwise plan` searches longer"
    return "; ".join(what_is_missing(result, request))


def nearest_fit(job: Job) -> Job | None:
    """The job with one change, or else several, after which it fits; quick, since nothing is searched."""
    change = fitting_change(job)
    if change is not None:
        return change.job
    return None if is_unlike(job) else _by_several_changes(job)


def _by_several_changes(job: Job) -> Job | None:
    """Repeats the change that saves most memory until the job fits, without offload; much faster than a search."""
    status, least_bytes = verdict(job).status, peak_memory(job).total
    while fit_of(job) != "fits":
        alike = [other for other in neighbours(job) if other.strategy.offload == job.strategy.offload]
        priced = [(peak_memory(other).total, other) for other in alike if verdict(other).status == status]
        saved_bytes, job = min(priced, key=lambda pair: pair[0], default=(least_bytes, job))
        if saved_bytes >= least_bytes:
            return None
        least_bytes = saved_bytes
    try:
        predict(job)
    except SpecError:  # a group cannot be placed on the network
        return None
    return job


def _nearest(job: Job, plan: Plan) -> str:
    """Words for the strategy of the plan that differs from the job's in the fewest fields; the fastest of several."""

    def changes(strategy: Strategy) -> int:
        return sum(getattr(strategy, field.name) != getattr(job.strategy, field.name) for field in fields(Strategy))

    best = min(plan.candidates, key=lambda candidate: (changes(candidate.job.strategy), candidate.step_seconds))
    return f"nearest that fits: {strategy_words(best.job.strategy)} ({readable_bytes(best.memory.total)})"


def _with_offload(job: Job) -> str | None:
    """Words for the least offload that makes the job fit: to the host, or on a CPU, whose own memory is full, to
    disk."""
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
