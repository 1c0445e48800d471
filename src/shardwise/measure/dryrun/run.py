"""A dry run: a few traces, extrapolated to the whole rank, against the planner's figures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.engine.experts.loads import Assumed
from shardwise.engine.refuse import require_runs
from shardwise.layout.ranks import coordinate, coordinates
from shardwise.measure.dryrun.compare import (
    compared_bytes,
    compared_flops,
    compared_moves,
    planned_flops,
    planned_memory,
)
from shardwise.measure.dryrun.extend import Extension, Shape, alike, at_one_moment, extension, most
from shardwise.measure.dryrun.places import Place
from shardwise.measure.dryrun.request import check_rank, fullest_rank
from shardwise.measure.dryrun.result import Bytes, Calls, Compared, DryRun
from shardwise.measure.dryrun.trace import Trace, trace, whole_shape
from shardwise.pipeline import ActionKind, build
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

LAYERS = 4  # of a kind: two near the front of a stage and two near its back are unlike those between
MICROBATCHES = (3, 4)  # the first, which finds no gradients, the last, which reduces them, and what is between


def dry_run(job: Job, *, rank: int | None = None, skew: float = 1.0, full: bool = False) -> DryRun:
    """One step of ``rank`` (the fullest one unless given), of the second step on.

    Experts get equally many tokens, those of this rank ``skew`` times as many as the others. ``full`` traces every
    layer and microbatch; else a few of them are, which gives the same figures.
    """
    started = time.perf_counter()
    require_runs(job)
    if not job.strategy.synchronise.every_step:
        problem = "a trace covers one step, and workers do not synchronise every step"
        raise SpecError("strategy.synchronise", problem, "leave it out")
    rank = fullest_rank(job) if rank is None else check_rank(job, rank)
    pipeline_rank = coordinate(job.strategy, "pp", rank)
    whole = whole_shape(job, pipeline_rank)
    full = full or _first_layers_differ(job)
    plan = Extension(whole, whole, whole.microbatches, ()) if full else _to_trace(job, pipeline_rank, whole)
    assumed = Assumed(skew, _most_nodes(job))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about forms that its own parts call
        traces = {shape: trace(job, rank, shape, assumed) for shape in plan.shapes}
    moments = [_moments(one, plan.small, shape.microbatches) for shape, one in traces.items()]
    peaks = dict(zip(traces, at_one_moment(moments)))
    numbers = plan.extended(lambda shape: _numbers(traces[shape], peaks[shape]))
    place, peak = most(_by_place(numbers))
    calls = _calls(numbers)
    flops = {key[1]: number for key, number in _of("flops", numbers)}
    as_planned = planned_flops(job, pipeline_rank, coordinate(job.strategy, "cp", rank))
    planned = planned_memory(job, pipeline_rank)
    compared = compared_bytes(job, pipeline_rank, {one.line: one.bytes for one in calls})
    return DryRun(
        job=job,
        rank=rank,
        coordinates=coordinates(job.strategy, rank),
        peak=peak,
        peak_place=place.words,
        planned_peak=planned,
        calls=calls,
        flops=flops,
        planned_flops=as_planned,
        compared=(
            *compared,
            *compared_moves(job, pipeline_rank, {key[1]: size for key, size in _of("moved", numbers)}),
            Compared("peak memory", sum(planned.values()), sum(peak.values())),
            *compared_flops(as_planned, flops),
        ),
        holders=traces[plan.shapes[-1]].holders,
        traced=_described(plan),
        seconds=time.perf_counter() - started,
    )


def _first_layers_differ(job: Job) -> bool:
    """A share of weights or gradients that are offloaded is whole parameters, the first ones."""
    offload = job.strategy.offload
    return any(0 < share < 1 for share in (offload.weights, offload.gradients))


def _to_trace(job: Job, pipeline_rank: int, whole: Shape) -> Extension:
    """Enough microbatches that a pipeline is as full as it gets, and stays so, before the half of them is over."""
    strategy = job.strategy
    if strategy.pp == 1:
        return extension(whole, LAYERS, MICROBATCHES)
    few = 2 * strategy.pp  # divides into what interleaving takes at a time
    in_flight = _most_of_one_stage(job, pipeline_rank) if not strategy.schedule_record.forwards_first else 0
    while few // 2 <= in_flight:
        few += strategy.pp
    return extension(whole, LAYERS, (few, few + strategy.pp))


def _most_of_one_stage(job: Job, pipeline_rank: int) -> int:
    """Microbatches that a stage of the rank is ahead of their backward passes; a pipeline is full with 2p of them."""
    strategy = job.strategy
    microbatches = min(job.microbatches, 4 * strategy.pp)
    schedule = build(strategy.schedule, strategy.pp, microbatches, strategy.chunks_per_rank)
    ahead, most = dict.fromkeys(schedule.stages_of(pipeline_rank), 0), 0
    change = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: 0, ActionKind.W: -1}
    for action in schedule.actions[pipeline_rank]:
        ahead[action.stage] += change[action.kind]
        most = max(most, ahead[action.stage])
    return most


def _most_nodes(job: Job) -> int | None:
    """Nodes that a token's experts may be on, where routing limits them by groups of experts, one on each."""
    moe, node = job.model.moe, job.cluster.node_devices
    if moe is None or moe.groups == 1:
        return None
    nodes = max(1, job.strategy.ep * job.strategy.expert_tensor_parallel // node)
    return moe.groups_used if nodes == moe.groups else None


def _moments(traced: Trace, small: Shape, microbatches: int) -> dict[Place, Sequence[Bytes]]:
    """Memory at the places that have the same name in traces of other shapes."""
    named = ((alike(place, small, microbatches), moments) for place, moments in traced.moments.items())
    return {name: moments for name, moments in named if name is not None}


def _numbers(traced: Trace, peaks: Mapping[Place, Bytes]) -> dict[object, float]:
    """A trace as numbers by name, the same names in traces of other shapes."""
    numbers: dict[object, float] = {}
    for line, count in traced.calls.items():
        numbers["calls", line] = count
        numbers["bytes", line] = traced.sent_bytes[line]
    for moved, size in traced.moved.items():
        numbers["moved", moved] = size
    for kind, flops in traced.flops.items():
        numbers["flops", kind] = flops
    for place, parts in peaks.items():
        numbers.update({("peak", place, part): size for part, size in parts.items()})
    return numbers


def _of(what: str, numbers: dict[object, float]) -> list[tuple[Any, float]]:
    return [(key, number) for key, number in numbers.items() if isinstance(key, tuple) and key[0] == what]


def _by_place(numbers: dict[object, float]) -> dict[Place, Bytes]:
    found: dict[Place, Bytes] = {}
    for (_, place, part), size in _of("peak", numbers):
        found.setdefault(place, {})[part] = size
    return found


def _calls(numbers: dict[object, float]) -> tuple[Calls, ...]:
    sizes = {key[1]: size for key, size in _of("bytes", numbers)}
    found = [Calls(key[1], count, sizes[key[1]]) for key, count in _of("calls", numbers)]
    order: Callable[[Calls], Any] = lambda one: (one.line.dimension, -one.bytes, one.line.name)  # noqa: E731
    return tuple(sorted(found, key=order))


def _described(plan: Extension) -> str:
    if plan.small == plan.whole:
        return "all layers and microbatches"
    layers = sum(number for _, number in plan.small.layers)
    of = sum(number for _, number in plan.whole.layers)
    return (
        f"{layers} of {of} layers and {plan.small.microbatches} of {plan.whole.microbatches} microbatches, "
        f"and one more of each kind"
    )
