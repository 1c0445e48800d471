"""Stages by what they cost: layers are divided by time and memory, with embedding and loss counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.cost.memory import memory_of_rank
from shardwise.cost.stages import chunk_of_rank
from shardwise.pipeline import Place, layers_of, partition_over
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.pieces import Pieces, in_flight, layer_counts, pieces_of, room_for_pieces
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

WORTH = 0.001  # a division of its own has to be this much faster than an even one


def with_best_stages(found: Candidate, capacity_bytes: float) -> Candidate:
    """The same strategy with stages of its own where that is faster in the simulation and fits; else ``found`` itself."""
    best = found
    for job in _proposals(found.job, capacity_bytes):
        other = candidate(job)
        if other.step_seconds < best.step_seconds - WORTH * found.step_seconds and fits(job, capacity_bytes):
            best = other
    return best


def fits(job: Job, capacity_bytes: float) -> bool:
    """Whether every rank's device, and its part of the host, holds what the job puts there."""
    cluster = job.cluster
    host = float("inf") if cluster.host_memory is None else cluster.host_memory / cluster.node_devices
    memories = [memory_of_rank(job, rank) for rank in range(job.strategy.pp)]
    return all(one.total <= capacity_bytes and one.host <= host for one in memories)


def _proposals(job: Job, capacity_bytes: float) -> Iterator[Job]:
    if job.strategy.pp == 1:
        return
    pieces = pieces_of(job)
    ways = (_by_stage, _by_rank) if job.strategy.chunks_per_rank > 1 else (_by_stage,)
    now = pieces.slowest_rank_seconds(job)
    seen: set[tuple[int, ...]] = set()
    for divide in ways:
        try:
            counts = divide(job, pieces, capacity_bytes)
            other = replace(job, strategy=replace(job.strategy, stage_layers=counts))
        except SpecError:
            continue  # fewer layers than stages, or nothing fits
        if counts not in seen and pieces.slowest_rank_seconds(other) < now:
            yield other
        seen.add(counts)


def _by_stage(job: Job, pieces: Pieces, capacity_bytes: float) -> tuple[int, ...]:
    """The slowest stage as fast as can be. Several stages of one rank share its memory: then that is left aside."""
    ranks, chunks = range(job.strategy.pp), job.strategy.chunks_per_rank
    if chunks > 1:
        places = [Place()] * (len(ranks) * chunks)
    else:
        places = [_place(job, pieces, rank, capacity_bytes) for rank in ranks]
    return layer_counts(partition_over(pieces.row, places).layer_counts)


def _by_rank(job: Job, pieces: Pieces, capacity_bytes: float) -> tuple[int, ...]:
    """The slowest rank as fast as can be, over all of its stages; layers that differ count as their mean."""
    ranks = range(job.strategy.pp)
    layer, layers = pieces.mean_layer, len(pieces.layers)
    both = len(job_ends(job, 0)) == 2  # V-shaped: the first rank has the last stage too
    first = pieces.embedding + pieces.head if both else pieces.embedding
    row = layers_of(
        [layer.seconds] * layers,
        [layer.bytes] * layers,
        [layer.activation_bytes] * layers,
        first_extra_seconds=first.seconds,
        last_extra_seconds=0.0 if both else pieces.head.seconds,
        first_extra_bytes=first.bytes + in_flight(job, 0) * first.activation_bytes,
        last_extra_bytes=0.0 if both else pieces.head.bytes,
    )
    places = [_place(job, pieces, rank, capacity_bytes) for rank in ranks]
    return over_chunks(job, pieces, partition_over(row, places).layer_counts)


def job_ends(job: Job, rank: int) -> list[int]:
    """The first and last stage of the model, as far as they are on this rank."""
    last = job.strategy.pp * job.strategy.chunks_per_rank - 1
    return [stage for stage in chunk_of_rank(job, rank) if stage in (0, last)]


def over_chunks(job: Job, pieces: Pieces, of_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of every stage from those of every rank: each of its stages takes about as long as the others."""
    counts = [0] * (job.strategy.pp * job.strategy.chunks_per_rank)
    ends = {0: pieces.embedding.seconds, len(counts) - 1: pieces.head.seconds}
    for rank, layers in enumerate(of_ranks):
        stages = chunk_of_rank(job, rank)
        for stage in stages:
            counts[stage] = 0 if stage in ends else 1
        for _ in range(layers - sum(counts[stage] for stage in stages)):
            seconds = [ends.get(stage, 0.0) + counts[stage] * pieces.mean_layer.seconds for stage in stages]
            counts[stages[seconds.index(min(seconds))]] += 1
    return tuple(counts)


def _place(job: Job, pieces: Pieces, rank: int, capacity_bytes: float) -> Place:
    room = room_for_pieces(job, pieces, rank, capacity_bytes)
    return Place(1.0, max(1.0, room), in_flight(job, rank))
