"""A traced rank against the planner's figures: bytes of every dimension and kind of collective, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.collectives import CollectiveKind
from shardwise.cost.compute.operators import fully_recomputed_share, head_operators, layer_operators, share_run_again
from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.step.stage_time import layer_shape
from shardwise.cost.traffic.execution import step_traffic
from shardwise.cost.traffic.payload import Payload, Role
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.stages import rank_contents
from shardwise.measure.dryrun.result import PARTS, RECEIVE, Bytes, Compared, Line
from shardwise.spec.job import Job

# What is less than this share of all that a rank sends is not worth a price: norms, counts, losses.
NEGLIGIBLE = 5e-3


def compared_bytes(job: Job, pipeline_rank: int, traced: Mapping[Line, float]) -> list[Compared]:
    """One line for every dimension and kind of collective that either knows of."""
    planned: dict[tuple[str, str], float] = {}
    for one in step_traffic(job, rank_contents(job, pipeline_rank)):
        if one.dimension != "offload":
            key = (one.dimension, str(_kind_as_sent(one)))
            size = one.bytes_sent if _in_levels(job, *key) else one.count * one.size_bytes
            planned[key] = planned.get(key, 0.0) + size * _boundaries_with_one_peer(job, *key)
    found = traced_bytes(job, traced)
    total = max(sum(planned.values()), sum(found.values()))
    lines = []
    for key in {**planned, **found}:
        as_planned, as_traced = planned.get(key, 0.0), found.get(key, 0.0)
        negligible = max(as_planned, as_traced) < NEGLIGIBLE * total
        lines.append(Compared(f"{key[0]} {key[1]}", as_planned, as_traced, negligible))
    return lines


def compared_moves(job: Job, pipeline_rank: int, traced: Mapping[Payload, float]) -> list[Compared]:
    """One line for every kind of transfer between the device and its host that either knows of."""
    planned: dict[Payload, float] = {}
    for one in step_traffic(job, rank_contents(job, pipeline_rank)):
        if one.dimension == "offload":
            planned[one.payload] = planned.get(one.payload, 0.0) + one.count * one.size_bytes
    enough = NEGLIGIBLE * max(sum(planned.values()), sum(traced.values()))
    pairs = {moved: (planned.get(moved, 0.0), traced.get(moved, 0.0)) for moved in {**planned, **traced}}
    return [
        Compared(f"offload {moved.words}", *pair, max(pair) < enough) for moved, pair in pairs.items() if max(pair) > 0
    ]


def traced_bytes(job: Job, traced: Mapping[Line, float]) -> dict[tuple[str, str], float]:
    """By dimension and kind. Of a pipeline, what crosses the busier of a rank's two boundaries, both ways."""
    found: dict[tuple[str, str], float] = {}
    boundaries: dict[int, float] = {}
    for line, size in traced.items():
        if line.dimension == "pp" and line.peer is not None:
            boundaries[line.peer] = boundaries.get(line.peer, 0.0) + size
        elif line.kind != RECEIVE:
            key = (line.dimension, line.kind)
            leaving = (line.ranks - 1) / line.ranks if _in_levels(job, *key) else 1.0
            found[key] = found.get(key, 0.0) + size * leaving
    if boundaries:
        found["pp", str(CollectiveKind.SEND_RECV)] = max(boundaries.values())
    return found


def _kind_as_sent(one: Traffic) -> CollectiveKind:
    """Both ends of a pipeline sum the gradients of their embedding, priced as the one exchange that this is."""
    return CollectiveKind.ALL_REDUCE if one.payload.role is Role.TIED_GRADIENTS else one.kind


def _boundaries_with_one_peer(job: Job, dimension: str, kind: str) -> float:
    """Of two ranks in a loop each is before and behind the other: 2v−1 boundaries instead of the v of one side."""
    strategy, chunks = job.strategy, job.strategy.chunks_per_rank
    folded = strategy.schedule_record.placement == "loop" and strategy.pp == 2
    messages = (dimension, kind) == ("pp", str(CollectiveKind.SEND_RECV))
    return (2 * chunks - 1) / chunks if folded and messages else 1.0


def _in_levels(job: Job, dimension: str, kind: str) -> bool:
    """An exchange in several levels has no one size: what leaves the rank is compared."""
    deduplicated = job.strategy.dispatch == "deduplicated"
    return deduplicated and (dimension, kind) == ("ep", str(CollectiveKind.ALL_TO_ALL))


def planned_memory(job: Job, pipeline_rank: int) -> Bytes:
    """By part, without the allowance for the framework."""
    memory = memory_of_rank(job, pipeline_rank)
    return {part: float(getattr(memory, part)) for part in PARTS}


def planned_flops(job: Job, pipeline_rank: int, context_rank: int) -> dict[str, float]:
    """Matmuls and attention of all microbatches: a backward pass is two forward passes."""
    contents = rank_contents(job, pipeline_rank)
    shape, share = layer_shape(job, context_rank), fully_recomputed_share(job, contents)
    flops = {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        for one in layer_operators(job.model, shape, moe=moe):
            flops[one.kind] += count * one.flops * one.attended * (3 + share_run_again(job, one, share))
    for one in head_operators(job.model, shape) if contents.has_head else ():
        flops[one.kind] += 3 * one.flops
    return {"products": flops["product"] * job.microbatches, "attention": flops["attention"] * job.microbatches}


def compared_flops(planned: Mapping[str, float], traced: Mapping[str, float]) -> list[Compared]:
    """One line for matmuls and one for attention."""
    enough = NEGLIGIBLE * sum(planned.values())
    return [
        Compared(f"FLOPs of {kind}", planned[kind], traced[kind], planned[kind] < enough, "FLOPs") for kind in planned
    ]
