"""A dry run: a few traces, extrapolated to the whole rank, beside the planner's figures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwise.collectives import CollectiveKind
from shardwise.cost.compute.operators import Operator, ends_operators, layer_operators
from shardwise.cost.compute.recompute import fully_recomputed_share, share_run_again
from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.memory.states import updated_parameters
from shardwise.cost.step.stage_time import layer_shape
from shardwise.cost.traffic.execution import step_traffic
from shardwise.engine.experts.rows import Assumed
from shardwise.engine.refuse import require_runs
from shardwise.layout.groups import coordinate, coordinates
from shardwise.layout.payloads import STATES_TO_DEVICE, Payload, Role, sent_forward
from shardwise.layout.pieces import update_chunk
from shardwise.layout.sharding import sharding_of, updates_on_device
from shardwise.layout.stages import rank_contents
from shardwise.layout.views import seen_by
from shardwise.measure.dryrun.memory import StepPlace
from shardwise.measure.dryrun.result import (
    PARTS,
    RECEIVE,
    Bytes,
    Calls,
    Compared,
    DryRun,
    TracedCollective,
    check_rank,
    fullest_rank,
    require_equal_stages,
)
from shardwise.measure.dryrun.trace import (
    Extension,
    Key,
    Trace,
    TracedShape,
    alike,
    at_one_moment,
    extension,
    trace,
    whole_shape,
)
from shardwise.pipeline import ActionKind, build
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

# -- a traced rank against the planner's figures -----------------------------------------------------

NEGLIGIBLE = 5e-3  # of everything a rank sends: what is less is not priced (norms, counts, losses)
_FLOPS = {"products": "matmuls", "attention": "attention"}


def compared_bytes(job: Job, pipeline_rank: int, traced: Mapping[TracedCollective, float]) -> list[Compared]:
    """One line for every dimension and kind of collective that is planned or traced."""
    planned: dict[tuple[str, str], float] = {}
    for traffic in step_traffic(job, rank_contents(job, pipeline_rank)):
        if traffic.dimension != "offload":
            # The ends of a pipeline all-reduce the gradients of a tied embedding, which is priced as a message.
            tied = traffic.payload.role is Role.TIED_GRADIENTS
            key = (traffic.dimension, str(CollectiveKind.ALL_REDUCE if tied else traffic.kind))
            size = traffic.bytes_sent if _in_levels(job, *key) else traffic.count * traffic.size_bytes
            planned[key] = planned.get(key, 0.0) + size * _boundaries_with_one_peer(job, *key)
    return _lines(planned, traced_bytes(job, traced), " ".join)


def compared_moves(job: Job, pipeline_rank: int, traced: Mapping[Payload, float]) -> list[Compared]:
    """One line for every kind of transfer between device and host that is planned or traced."""
    lines = step_traffic(job, rank_contents(job, pipeline_rank))
    moved = ((line.payload, line.count * line.size_bytes) for line in lines if line.dimension == "offload")
    planned, moved_in_trace = (_states_together(each) for each in (moved, traced.items()))
    compared = _lines(planned, moved_in_trace, lambda payload: f"offload {payload.words}")
    return [line for line in compared if line.planned or line.traced]


def _states_together(moved: Iterable[tuple[Payload, float]]) -> dict[Payload, float]:
    """Sums bytes by payload; optimizer states that are fetched early count with those fetched for their update."""
    together: dict[Payload, float] = {}
    for payload, size in moved:
        kind = sent_forward(Role.STATES_FROM_HOST) if payload.role in STATES_TO_DEVICE else payload
        together[kind] = together.get(kind, 0.0) + size
    return together


def _lines(planned: Mapping[Key, float], traced: Mapping[Key, float], title: Callable[[Key], str]) -> list[Compared]:
    enough = NEGLIGIBLE * max(sum(planned.values()), sum(traced.values()))
    pairs = {key: (planned.get(key, 0.0), traced.get(key, 0.0)) for key in {**planned, **traced}}
    return [Compared(title(key), *pair, max(pair) < enough) for key, pair in pairs.items()]


def traced_bytes(job: Job, traced: Mapping[TracedCollective, float]) -> dict[tuple[str, str], float]:
    """Bytes by dimension and kind. For a pipeline, what crosses the busier of a rank's two boundaries, both ways."""
    totals: dict[tuple[str, str], float] = {}
    boundaries: dict[int, float] = {}
    for line, size in traced.items():
        if line.dimension == "pp" and line.peer is not None:
            boundaries[line.peer] = boundaries.get(line.peer, 0.0) + size
        elif line.kind != RECEIVE:
            key = (line.dimension, line.kind)
            leaving = (line.ranks - 1) / line.ranks if _in_levels(job, *key) else 1.0
            totals[key] = totals.get(key, 0.0) + size * leaving
    if boundaries:
        totals["pp", str(CollectiveKind.SEND_RECV)] = max(boundaries.values())
    return totals


def _boundaries_with_one_peer(job: Job, dimension: str, kind: str) -> float:
    """Two ranks in a loop are each other's previous and next: 2v−1 boundaries between them instead of v."""
    strategy, chunks = job.strategy, job.strategy.chunks_per_rank
    folded = strategy.schedule_record.placement == "loop" and strategy.pp == 2
    messages = (dimension, kind) == ("pp", str(CollectiveKind.SEND_RECV))
    return (2 * chunks - 1) / chunks if folded and messages else 1.0


def _in_levels(job: Job, dimension: str, kind: str) -> bool:
    """Whether an exchange runs in several levels and so has no single size: then what leaves the rank is compared."""
    deduplicated = job.strategy.dispatch == "deduplicated"
    return deduplicated and (dimension, kind) == ("ep", str(CollectiveKind.ALL_TO_ALL))


def planned_flops(job: Job, pipeline_rank: int, context_rank: int) -> dict[str, float]:
    """FLOPs of matmuls and attention in all microbatches; a backward pass counts as two forward passes."""
    contents = rank_contents(job, pipeline_rank)
    shape, share = layer_shape(job, context_rank), fully_recomputed_share(job, contents)
    flops = {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    for kind, count in contents.kinds:
        for operator in layer_operators(job.model, shape, kind, job.training.tuning):
            flops[operator.kind] += (
                count
                * operator.flops
                * operator.attended
                * (_passes_of(operator) + share_run_again(job, operator, share))
            )
    for operator in ends_operators(job.model, shape, job.training.tuning) if contents.has_head else ():
        flops[operator.kind] += _passes_of(operator) * operator.flops
    return {"products": flops["product"] * job.microbatches, "attention": flops["attention"] * job.microbatches}


def _passes_of(operator: Operator) -> float:
    """Forward, the gradient of inputs, and that of weights; attention has no weights, and two products for inputs."""
    return 1 + operator.flows + (operator.trained if operator.kind == "product" else operator.flows)


def compared_flops(planned: Mapping[str, float], traced: Mapping[str, float]) -> list[Compared]:
    """One line for matmuls and one for attention."""
    enough = NEGLIGIBLE * sum(planned.values())
    return [
        Compared(f"FLOPs of {title}", planned[kind], traced[kind], planned[kind] < enough, "FLOPs")
        for kind, title in _FLOPS.items()
    ]


# -- the dry run -------------------------------------------------------------------------------------

LAYERS = 4  # of a kind: two at the front of a stage and two at its back, which differ from those between
MICROBATCHES = (3, 4)  # the first, which finds no gradients, the last, which reduces them, and those between


def dry_run(job: Job, *, rank: int | None = None, skew: float = 1.0, full: bool = False) -> DryRun:
    """Traces one step of ``rank`` (default: the fullest one), not the run's first.

    Experts get equally many tokens, but those of this rank ``skew`` times as many as the others. ``full`` traces every
    layer and microbatch; otherwise only a few are traced, which gives the same figures.
    """
    started = time.perf_counter()
    require_runs(job)
    require_equal_stages(job)
    if not job.strategy.synchronise.every_step:
        problem = "a trace covers one step, and workers do not synchronise every step"
        raise SpecError("strategy.synchronise", problem, "leave it out")
    rank = fullest_rank(job) if rank is None else check_rank(job, rank)
    job = seen_by(job, rank)
    pipeline_rank = coordinate(job.strategy, "pp", rank)
    whole = whole_shape(job, pipeline_rank)
    # If only a share of weights or gradients is offloaded, it is that of the first parameters, so layers differ.
    full = full or any(0 < share < 1 for share in (job.strategy.offload.weights, job.strategy.offload.gradients))
    full = full or _few_layers_move_smaller_chunks(job, pipeline_rank)
    plan = Extension(whole, whole, whole.microbatches, ()) if full else _to_trace(job, pipeline_rank, whole)
    assumed = Assumed(skew, _most_nodes(job))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about deprecated calls in its own code
        traces = {shape: trace(job, rank, shape, assumed) for shape in plan.shapes}
    moments = [_moments(traced, plan.small, shape.microbatches) for shape, traced in traces.items()]
    peaks = _peaks(plan, dict(zip(traces, at_one_moment(moments))))
    place, peak = max(peaks.items(), key=lambda peak_at: sum(peak_at[1].values()))
    calls = _calls(plan, traces)
    flops = plan.extended(lambda shape: traces[shape].flops)
    moved = plan.extended(lambda shape: traces[shape].moved)
    as_planned = planned_flops(job, pipeline_rank, coordinate(job.strategy, "cp", rank))
    memory = memory_of_rank(job, pipeline_rank)
    planned = {part: float(getattr(memory, part)) for part in PARTS}  # without the allowance for the framework
    compared = compared_bytes(job, pipeline_rank, {call.line: call.bytes for call in calls})
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
            *compared_moves(job, pipeline_rank, moved),
            Compared("peak memory", sum(planned.values()), sum(peak.values())),
            *compared_flops(as_planned, flops),
        ),
        holders=traces[plan.shapes[-1]].holders,
        traced=_described(plan),
        seconds=time.perf_counter() - started,
    )


def _few_layers_move_smaller_chunks(job: Job, pipeline_rank: int) -> bool:
    """Whether the chunks of stored states, some of which are on the device, do not grow evenly with the layers."""
    contents = rank_contents(job, pipeline_rank)
    elements = updated_parameters(contents, sharding_of(job.strategy)) * job.strategy.offload.optimizer
    traced = elements * min(1.0, LAYERS / contents.layers)
    return updates_on_device(job, job.strategy.offload) and bool(update_chunk(traced) < update_chunk(elements))


def _to_trace(job: Job, pipeline_rank: int, whole: TracedShape) -> Extension:
    """Chooses enough microbatches that the pipeline is full before half of them are done."""
    strategy = job.strategy
    if strategy.pp == 1:
        return extension(whole, LAYERS, MICROBATCHES)
    few = 2 * strategy.pp  # a multiple of what interleaving takes at a time
    in_flight = _most_of_one_stage(job, pipeline_rank) if not strategy.schedule_record.forwards_first else 0
    while few // 2 <= in_flight:
        few += strategy.pp
    return extension(whole, LAYERS, (few, few + strategy.pp))


def _most_of_one_stage(job: Job, pipeline_rank: int) -> int:
    """The most microbatches that a stage of this rank holds between forward and backward; 2p fill any pipeline."""
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
    """On how many nodes a token's experts may be, if routing is limited to some groups of experts, one per node."""
    moe, node = job.model.moe, job.cluster.node_devices
    if moe is None or moe.groups == 1:
        return None
    nodes = max(1, job.strategy.ep * job.strategy.expert_tensor_parallel // node)
    return moe.groups_used if nodes == moe.groups else None


def _moments(traced: Trace, small: TracedShape, microbatches: int) -> dict[StepPlace, Sequence[Bytes]]:
    """Memory at the places that traces of other shapes have too, by their common names."""
    named = ((alike(place, small, microbatches), moments) for place, moments in traced.moments.items())
    return {name: moments for name, moments in named if name is not None}


def _peaks(plan: Extension, peaks: Mapping[TracedShape, Mapping[StepPlace, Bytes]]) -> dict[StepPlace, Bytes]:
    """The memory of the whole rank by place and part."""
    numbers = plan.extended(
        lambda shape: {(place, part): size for place, parts in peaks[shape].items() for part, size in parts.items()}
    )
    by_place: dict[StepPlace, Bytes] = {}
    for (place, part), size in numbers.items():
        by_place.setdefault(place, {})[part] = size
    return by_place


def _calls(plan: Extension, traces: Mapping[TracedShape, Trace]) -> tuple[Calls, ...]:
    counts = plan.extended(lambda shape: traces[shape].calls)
    sizes = plan.extended(lambda shape: traces[shape].sent_bytes)
    calls = [Calls(line, count, sizes[line]) for line, count in counts.items()]
    return tuple(sorted(calls, key=lambda call: (call.line.dimension, -call.bytes, call.line.name)))


def _described(plan: Extension) -> str:
    if plan.small == plan.whole:
        return "all layers and microbatches"
    layers = sum(number for _, number in plan.small.layers)
    of = sum(number for _, number in plan.whole.layers)
    return (
        f"{layers} of {of} layers and {plan.small.microbatches} of {plan.whole.microbatches} microbatches, "
        f"and one more of each kind"
    )
