"""Stages by what they cost: layers are divided by time and memory, with embedding and loss counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.layout.stages import stages_of_rank
from shardwise.pipeline import Place, layers_of, partition_over
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.pieces import NOTHING, Pieces, layer_counts, pieces_of, room_for_pieces
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

MOST_CELLS = 20_000_000  # of the partitioner's tables, layers²·stages: about a second; deeper models keep even stages
WORTH = 0.001  # a division of its own has to be this much faster than an even one


def with_best_stages(found: Candidate, capacity_bytes: float) -> Candidate:
    """The same strategy with stages of its own where its simulated step is faster and fits; else ``found`` itself."""
    best = found
    for job in _proposals(found.job, capacity_bytes):
        other = candidate(job)
        if other.step_seconds < best.step_seconds - WORTH * found.step_seconds and fits(job, capacity_bytes):
            best = other
    return best


def fits(job: Job, capacity_bytes: float) -> bool:
    """Whether every rank's device, and its part of the host, holds what the job puts there."""
    memories = [memory_of_rank(job, rank) for rank in range(job.strategy.pp)]
    host_bytes = job.cluster.host_memory_per_device
    return all(one.total <= capacity_bytes and one.host <= host_bytes for one in memories)


def _proposals(job: Job, capacity_bytes: float) -> Iterator[Job]:
    """The same job with other stages, whose slowest rank takes less time for a microbatch."""
    ranks = range(job.strategy.pp)
    if len(ranks) == 1 or job.model.layers**2 * job.strategy.stages > MOST_CELLS:
        return
    pieces = pieces_of(job)
    rooms = [room_for_pieces(job, pieces, rank, capacity_bytes) for rank in ranks]
    places = [Place(1.0, max(1.0, room), microbatches_in_flight(job, rank)) for rank, room in zip(ranks, rooms)]
    now = max(pieces.of_rank(job, rank).seconds for rank in ranks)
    for counts in divisions(job, pieces, places):
        try:
            other = replace(job, strategy=replace(job.strategy, stage_layers=counts))
        except SpecError:
            continue  # a stage in the middle has no layer
        if max(pieces.of_rank(other, rank).seconds for rank in ranks) < now:
            yield other


def divisions(job: Job, pieces: Pieces, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Layers per stage, from one place per rank: by stage, and where a rank has several stages also by rank."""
    ways = (_by_stage, _by_rank) if job.strategy.chunks_per_rank > 1 else (_by_stage,)
    found: list[tuple[int, ...]] = []
    for divide in ways:
        try:
            found.append(divide(job, pieces, places))
        except SpecError:
            continue  # fewer layers than stages, or nothing fits
    return list(dict.fromkeys(found))


def _by_stage(job: Job, pieces: Pieces, places: Sequence[Place]) -> tuple[int, ...]:
    """The slowest stage as fast as can be. Several stages of one rank share its memory: then that is left aside."""
    if job.strategy.chunks_per_rank > 1:
        speeds = {stage: place.speed for rank, place in enumerate(places) for stage in stages_of_rank(job, rank)}
        places = [Place(speeds[stage]) for stage in range(len(speeds))]
    return layer_counts(partition_over(pieces.row, places).layer_counts)


def _by_rank(job: Job, pieces: Pieces, places: Sequence[Place]) -> tuple[int, ...]:
    """The slowest rank as fast as can be, over all of its stages; layers that differ count as their mean."""
    layer, count = pieces.mean_layer, len(pieces.layers)
    folded = job.strategy.schedule_record.ends_meet  # the first rank has the last stage too
    first, last = (pieces.embedding + pieces.head, NOTHING) if folded else (pieces.embedding, pieces.head)
    row = layers_of(
        [layer.seconds] * count,
        [layer.bytes] * count,
        [layer.activation_bytes] * count,
        first_extra_seconds=first.seconds,
        last_extra_seconds=last.seconds,
        first_extra_bytes=first.bytes + places[0].in_flight * first.activation_bytes,
        last_extra_bytes=last.bytes,
    )
    return _over_chunks(job, pieces, partition_over(row, places).layer_counts)


def _over_chunks(job: Job, pieces: Pieces, of_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of every stage from those of every rank: each of its stages takes about as long as the others."""
    counts = [0] * job.strategy.stages
    ends = {0: pieces.embedding.seconds, len(counts) - 1: pieces.head.seconds}
    for rank, layers in enumerate(of_ranks):
        stages = stages_of_rank(job, rank)
        for stage in stages:
            counts[stage] = 0 if stage in ends else 1
        for _ in range(layers - sum(counts[stage] for stage in stages)):
            seconds = [ends.get(stage, 0.0) + counts[stage] * pieces.mean_layer.seconds for stage in stages]
            counts[stages[seconds.index(min(seconds))]] += 1
    return tuple(counts)
