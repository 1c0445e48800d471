"""What makes a job fit: a single change, another strategy, offload, or other devices, each priced;
and what is missing if nothing fits: memory, devices, or a batch that divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of, fit_probability, margin_words, room_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import fitting_change, neighbours
from shardwise.layout.views import is_unlike
from shardwise.planner.automatic import KINDS, smallest_offload
from shardwise.planner.candidate import job_with
from shardwise.planner.constraints import Allowed
from shardwise.planner.describe import change_words, strategy_words
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search, search
from shardwise.planner.search.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes

_MOST_TIMES = 1024  # as many devices are tried
MOST_RISK = 0.5  # that a job may ask for


def what_is_missing(result: Search, request: Request) -> tuple[str, str]:
    """Why there is no plan, and what would make one."""
    if result.was_stopped:
        problem = f"nothing that fits was found within the time limit of {request.seconds:g} s"
        return problem, "give it longer (--time-limit 10min), or bound it: --tp 8, --pp 1..16"
    if not result.wanted:
        return _no_layout(request)
    least = result.least_memory
    if least is None:
        return f"this project's engine runs none of the strategies that divide{_first_lack(result, request)}", (
            "use --any for what is only priced"
        )
    strategy = least.strategy()
    cluster, room = request.job.cluster, request.room
    if least.memory_bytes <= room.planned_bytes and cluster.host_memory is not None:
        host, devices = readable_bytes(least.host_bytes * cluster.node_devices), _devices_that_fit(request)
        return (
            f"nothing fits: offloading ({strategy_words(strategy)}) would need {host} of host memory per node, "
            f"{readable_bytes(cluster.host_memory)} are there",
            f"use {f'{devices:,}' if devices else 'more'} devices, or hosts with more memory",
        )
    usable = f"{cluster.device.name} has {readable_bytes(room.usable_bytes)}"
    if room.is_capped:
        usable += " as capped"
    elif least.memory_bytes <= room.usable_bytes:
        usable += f", of which {margin_words(request.job)}"
    need = readable_bytes(least.memory_bytes)
    problem = f"nothing fits: the smallest strategy ({strategy_words(strategy)}) needs {need} per device, {usable}"
    return problem, ", or ".join(_remedies(request, least.memory_bytes))


def _remedies(request: Request, least_bytes: float) -> Iterator[str]:
    """Remedies that were tried, or follow from what fits."""
    room, device = request.room, request.job.cluster.device
    if room.is_capped and room_of(request.job).planned_bytes >= least_bytes:
        yield "leave out --max-memory"
        return
    devices = _devices_that_fit(request)
    if devices:
        yield f"use {devices:,} devices"
    if room.is_capped:
        return
    if least_bytes <= room.usable_bytes:
        risk = 1 - fit_probability(request.job, least_bytes)
        yield (
            f"accept --memory-risk {risk:.0%}" if risk <= MOST_RISK else "plan without that margin (--max-memory 100%)"
        )
    tensors = (room.planned_bytes - device.framework_memory) / (room.usable_bytes - device.framework_memory)
    whole = device.driver_memory + device.framework_memory + (least_bytes - device.framework_memory) / tensors
    yield f"use devices with {math.ceil(whole / 2**30):,} GiB"


def _first_lack(result: Search, request: Request) -> str:
    """Why the fastest priced-only strategy does not run."""
    if result.best_not_run is None:
        return ""
    job = job_with(request.job, result.best_not_run.strategy(), result.best_not_run.sequences)
    return "".join(f" ({' with '.join(finding.techniques)}: {finding.reason})" for finding in findings_of(job)[:1])


def _no_layout(request: Request) -> tuple[str, str]:
    """Nothing divides: the constraints contradict each other or the batch is too small."""
    job, constraints = request.job, request.constraints
    fixed: dict[str, Any] = {"dp": None, "stage_layers": "balanced"}
    for name, values in constraints.allowed.items():
        if values.values is not None and len(values.values) == 1:
            fixed[name] = values.values[0]
    try:
        replace(job, strategy=replace(Strategy(), **fixed))
    except SpecError as error:
        return f"{error.field}: {error.problem}" if error.field else error.problem, error.remedy
    if constraints.allowed:
        words = ", ".join(f"{name} {values}" for name, values in constraints.allowed.items())
        return f"no layout of {job.cluster.devices:,} devices has {words} and a batch that divides", "relax one of them"
    return (
        f"the global batch {job.training.global_batch} does not divide over any layout of "
        f"{job.cluster.devices:,} devices",
        "use a batch with more divisors, or one in tokens such as 4M-tokens, which is rounded",
    )


def _devices_that_fit(request: Request) -> int | None:
    """The least power of two times as many devices on which something fits; None if none does."""
    cluster = request.job.cluster
    small = {"recompute": Allowed(("full",)), "recompute_layers": Allowed((None,)), "microbatch": Allowed((1,)),
             "schedule": Allowed((PLAIN,)), "shard_group": Allowed((None,))}  # fmt: skip
    allowed = {name: values for name, values in small.items() if name not in request.constraints.allowed}
    times = 2
    while times <= _MOST_TIMES:
        try:
            larger = cluster.with_devices(cluster.devices * times)
        except SpecError:
            return None
        constraints = request.constraints.with_allowed(allowed)
        wider = replace(request.on(larger), constraints=constraints)
        space = wider.space(offload=request.offload is not False)
        deadline, capacity = request.deadline.part(), request.capacity_bytes
        if search(space, memory_bytes=capacity, any_priced=request.any_priced, kept=1, deadline=deadline).best:
            return larger.devices
        times *= 2
    return None


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
    # On a CPU offload to host memory gains nothing: that is what is full.
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
    """The first that fits of what one change, then several, make of the job; without a search, so at once."""
    change = fitting_change(job)
    if change is not None:
        return change.job
    return None if is_unlike(job) else _by_several_changes(job)


def _by_several_changes(job: Job) -> Job | None:
    """Greedy: the change that saves most, again and again, without offload; many times faster than a search."""
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
    """The strategy that differs in the fewest fields; the fastest of several."""

    def changes(strategy: Strategy) -> int:
        return sum(getattr(strategy, field.name) != getattr(job.strategy, field.name) for field in fields(Strategy))

    best = min(plan.candidates, key=lambda candidate: (changes(candidate.job.strategy), candidate.step_seconds))
    return f"nearest that fits: {strategy_words(best.job.strategy)} ({readable_bytes(best.memory.total)})"


def _with_offload(job: Job) -> str | None:
    """The least offload, if no layout fits without; on a CPU, whose own memory is full, to disk."""
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
