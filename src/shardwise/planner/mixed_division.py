"""Layers to the stages of several kinds of nodes: by the speed and the memory of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.layout.stages import stages_of_rank
from shardwise.pipeline import Place
from shardwise.planner.mixed_space import MixedRequest
from shardwise.planner.mixed_step import Arrangement, MixedStep, mixed_step
from shardwise.planner.pieces import Pieces, pieces_of, room_for_pieces
from shardwise.planner.stages import divisions

_SIMULATED = 200_000  # passes, in which neighbours of one division are tried
_MOST_TRIED = 48
_GAIN = 1e-4


def divided(request: MixedRequest, arrangement: Arrangement, pieces: dict[int, Pieces]) -> list[Arrangement]:
    """The arrangement with layers per stage by the speed and the memory of each kind, where that fits."""
    ranks = range(arrangement.strategy.pp)
    own = _in_one_measure(arrangement, pieces)
    speeds = _speeds(arrangement, pieces)
    rooms = [_room(request, arrangement, own, rank) for rank in ranks]
    places = [
        Place(speeds[kind], max(1.0, rooms[rank]), microbatches_in_flight(arrangement.job, rank))
        for rank, kind in enumerate(arrangement.kind_of_rank)
    ]
    ways = [arrangement.with_strategy(stage_layers=counts) for counts in divisions(arrangement.job, own, places)]
    return [way for way in ways if fits_kinds(request, way)]


def _speeds(arrangement: Arrangement, pieces: dict[int, Pieces]) -> dict[int, float]:
    """Of each kind, beside the first stage's."""
    first = pieces[arrangement.kinds[0]].mean_layer.seconds
    return {kind: first / own.mean_layer.seconds for kind, own in pieces.items()}


def _in_one_measure(arrangement: Arrangement, pieces: dict[int, Pieces]) -> Pieces:
    """The pieces in seconds of the first kind; the head is as slow as it is on the kind that has it."""
    last = arrangement.kind_of_rank[arrangement.head_rank]
    sharded = pieces_of(arrangement.joined(arrangement.kinds[0]), timed=pieces[arrangement.kinds[0]])
    seconds = pieces[last].head.seconds * _speeds(arrangement, pieces)[last]
    return replace(sharded, head=replace(sharded.head, seconds=seconds))


def _room(request: MixedRequest, arrangement: Arrangement, pieces: Pieces, rank: int) -> float:
    kind = arrangement.kind_of_rank[rank]
    return room_for_pieces(arrangement.on(kind), pieces, rank, request.capacity_bytes(kind))


def fits_kinds(request: MixedRequest, arrangement: Arrangement) -> bool:
    """Whether every stage in the middle has a layer, and every device holds what its rank puts there."""
    counts = arrangement.strategy.stage_layers
    if not isinstance(counts, tuple) or 0 in counts[1:-1] or min(counts) < 0:
        return False
    return all(
        memory_of_rank(arrangement.on(kind), rank).total <= request.capacity_bytes(kind)
        for rank, kind in enumerate(arrangement.kind_of_rank)
    )


def polished(request: MixedRequest, step: MixedStep) -> MixedStep:
    """The step with single layers moved while that helps.

    The partitioner makes the slowest stage as fast as can be. Of the divisions with the same slowest stage the best is
    one with short stages beside it: two that are equally slow also wait for each other's messages.
    """
    arrangement = step.arrangement
    passes = arrangement.job.microbatches * arrangement.strategy.stages
    left = min(_MOST_TRIED, _SIMULATED // passes)
    moves = _moves(step)
    while left > 0 and (move := next(moves, None)) is not None:
        way = _moved(step.arrangement, *move)
        if not fits_kinds(request, way):
            continue
        left -= 1
        other = mixed_step(way)
        if other.step_seconds < step.step_seconds * (1 - _GAIN):
            step, moves = other, _moves(other)
    return step


def _moves(step: MixedStep) -> Iterator[tuple[int, int]]:
    """From a stage of one of the slowest ranks to one of the fastest."""
    job = step.arrangement.job
    by_time = sorted(range(job.strategy.pp), key=lambda rank: -step.ranks[rank].microbatch_seconds)
    for slow, fast in product(by_time[:3], by_time[:-4:-1]):
        if by_time.index(slow) < by_time.index(fast):
            yield from product(stages_of_rank(job, slow), stages_of_rank(job, fast))


def _moved(arrangement: Arrangement, source: int, target: int) -> Arrangement:
    assert isinstance(arrangement.strategy.stage_layers, tuple)
    counts = list(arrangement.strategy.stage_layers)
    counts[source] -= 1
    counts[target] += 1
    return arrangement.with_strategy(stage_layers=tuple(counts))
