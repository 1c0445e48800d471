"""Neighbour to neighbour: the ring, the ring in both directions, the line, and axis after axis on meshes and tori."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.collectives.schedule import CollectiveKind, Schedule, Transfer, from_all_gather, schedule_of
from shardwise.collectives.shapes import Axis
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Algorithm, Work, axes_of, even, gathering

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size

# Chunk r starts at rank r and is passed on until everyone has it; reduce-scatter is the same backwards.


def ring_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    n = level.size
    if kind is CollectiveKind.ALL_TO_ALL:
        # Round r still carries n-r blocks over every link: (n-1)a + (n-1)/2 mb.
        return even(level, n - 1, (n - 1) / 2 * size)
    # (n-1)(a + mb/n): Thakur et al. 2005; bus factor (n-1)/n of nccl-tests PERFORMANCE.md.
    return gathering(kind, even(level, n - 1, (n - 1) / n * size))


def ring_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    if kind is CollectiveKind.ALL_TO_ALL:
        return _ring_all_to_all(n)
    rounds = [[Transfer(i, (i + 1) % n, ((i - k) % n,)) for i in range(n)] for k in range(n - 1)]
    return from_all_gather(kind, schedule_of(CollectiveKind.ALL_GATHER, n, n, rounds, "ring"))


def _ring_all_to_all(n: int) -> Schedule:
    # In round k rank i passes on the blocks of rank i-k which are for ranks beyond i.
    def blocks(i: int, k: int) -> tuple[int, ...]:
        source = (i - k) % n
        return tuple(source * n + (source + distance) % n for distance in range(k + 1, n))

    rounds = [[Transfer(i, (i + 1) % n, blocks(i, k)) for i in range(n)] for k in range(n - 1)]
    return schedule_of(CollectiveKind.ALL_TO_ALL, n, n * n, rounds, "ring")


RING = Algorithm("ring", ring_work, ring_build)


def parallel_rings_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """As many rings as share no link, each with its part of the bytes, as NCCL and RCCL build them."""
    ring = even(level, level.size - 1, (level.size - 1) / level.size * size)
    return gathering(kind, replace(ring, bytes=ring.bytes / level.shape.disjoint_rings))


PARALLEL_RINGS = Algorithm("parallel_rings", parallel_rings_work)


def two_way_rounds(axis: Axis) -> tuple[int, bool]:
    """Rounds of an all-gather that uses both directions, and whether the last one moves half blocks.

    A ring halves the distance; if its size is even, the last block comes half from either side (jax scaling-book).
    A line always needs n-1 rounds, since its ends are n-1 hops apart.
    """
    return (axis.size // 2, axis.size % 2 == 0) if axis.is_ring else (axis.size - 1, False)


def two_way_sent(axis: Axis) -> int:
    """Blocks that the busiest rank sends: inside a line of three or more it sends its own both ways."""
    return axis.size - 1 if axis.is_ring or axis.size <= 2 else axis.size + 1


def two_way_transfers(axis: Axis, round_index: int) -> list[tuple[int, int, int, int | None]]:
    """(src, dst, block, half) of one round of an all-gather in both directions; half is None for a whole block."""
    n, k = axis.size, round_index
    rounds, halved = two_way_rounds(axis)
    last_half = halved and k == rounds - 1
    moves: list[tuple[int, int, int, int | None]] = []
    for i in range(n):
        for direction, half in ((1, 0), (-1, 1)):
            dst, block = i + direction, i - direction * k
            if axis.is_ring:
                moves.append((i, dst % n, block % n, half if last_half else None))
            elif 0 <= dst < n and 0 <= block < n:
                moves.append((i, dst, block, None))
    return moves


def two_way_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    (axis,) = axes_of(level)
    n = axis.size
    rounds, _ = two_way_rounds(axis)
    # ring: floor(n/2)a + (n-1)/(2n)mb; line: (n-1)(a + mb/n).
    link_blocks = (n - 1) / 2 if axis.is_ring else n - 1
    block = size / n
    sent, received = two_way_sent(axis) * block, (n - 1) * block
    once = Work(rounds * axis.stride, link_blocks * axis.load * block, rounds, sent, received, n * received)
    return gathering(kind, once)


def two_way_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    (axis,) = axes_of(level)
    n, (rounds, halved) = axis.size, two_way_rounds(axis)
    split = 2 if halved else 1

    def ids(block: int, half: int | None) -> tuple[int, ...]:
        return tuple(block * split + part for part in range(split)) if half is None else (block * split + half,)

    made = [
        [Transfer(src, dst, ids(block, half)) for src, dst, block, half in two_way_transfers(axis, k)]
        for k in range(rounds)
    ]
    name = "bidirectional_ring" if axis.wrap else "line"
    return from_all_gather(kind, schedule_of(CollectiveKind.ALL_GATHER, n, n * split, made, name))


BIDIRECTIONAL_RING = Algorithm("bidirectional_ring", two_way_work, two_way_build)
LINE = Algorithm("line", two_way_work, two_way_build)


# -- Meshes and tori: gather along one axis after the other ------------------------------------------
# ``dimension_ordered`` moves the whole buffer along one axis at a time. ``bucket`` cuts it into as many parts as there
# are axes and starts part p on axis p, so that all axes are busy at once.


@dataclass(frozen=True)
class _Leg:
    """The all-gather of one part along one axis."""

    part: int
    axis_index: int
    axis: Axis
    blocks: int  # that move together, each a rank's share of the part
    before: tuple[int, ...]  # axes along which the part has been gathered already


def _phases(axes: tuple[Axis, ...], parts: int) -> list[list[_Leg]]:
    """Phases, each a leg per part; part p takes the axes in the order p, p+1, ... (last axis first for one part)."""
    count = len(axes)
    orders = [
        [(part + j) % count for j in range(count)] if parts > 1 else list(reversed(range(count)))
        for part in range(parts)
    ]
    phases: list[list[_Leg]] = []
    for j in range(count):
        legs = []
        for part, order in enumerate(orders):
            before = tuple(order[:j])
            blocks = math.prod(axes[i].size for i in before)
            legs.append(_Leg(part, order[j], axes[order[j]], blocks, before))
        phases.append(legs)
    return phases


def _phase_cost(legs: Iterable[_Leg]) -> tuple[int, int, float]:
    """Rounds, hops and blocks on the busiest link of one phase: every round waits for its slowest leg."""
    runs = []  # (first round after it, hops, blocks per link) of every leg's full and half rounds
    for leg in legs:
        rounds, halved = two_way_rounds(leg.axis)
        load = leg.blocks * leg.axis.load
        runs.append((rounds - halved, leg.axis.stride, float(load)))
        runs.append((rounds, leg.axis.stride, load / 2 if halved else float(load)))
    hops, blocks, done = 0, 0.0, 0
    for until in sorted({end for end, _, _ in runs}):
        running = [(stride, load) for end, stride, load in runs if end >= until]
        hops += (until - done) * max(stride for stride, _ in running)
        blocks += (until - done) * max(load for _, load in running)
        done = until
    return done, hops, blocks


def _work(kind: CollectiveKind, level: Level, size: Size, parts: int) -> Work:
    """Equal axes: sum(d-1)a + (n-1)/n mb/D on a mesh, sum floor(d/2)a + (n-1)/n mb/(2D) on a torus.

    Chan et al. 2007; jax scaling-book. Other axes: the finite sum over the rounds.
    """
    axes = axes_of(level)
    rounds, hops, blocks, sent = 0, 0, 0.0, 0
    for legs in _phases(axes, parts):
        phase_rounds, phase_hops, phase_blocks = _phase_cost(legs)
        rounds, hops, blocks = rounds + phase_rounds, hops + phase_hops, blocks + phase_blocks
        sent += sum(leg.blocks * two_way_sent(leg.axis) for leg in legs)
    n = level.size
    block = size / (n * parts)
    received = (n - 1) / n * size
    return gathering(kind, Work(hops, blocks * block, rounds, sent * block, received, n * received))


def _build(kind: CollectiveKind, level: Level, parts: int, name: str) -> Schedule:
    axes = axes_of(level)
    split = parts * 2  # chunk = (rank * parts + part) * 2 + half
    rounds: list[list[Transfer]] = []
    for legs in _phases(axes, parts):
        for k in range(max(two_way_rounds(leg.axis)[0] for leg in legs)):
            running = (leg for leg in legs if k < two_way_rounds(leg.axis)[0])
            rounds.append([transfer for leg in running for transfer in _leg_round(axes, leg, k, split)])
    gathered = schedule_of(CollectiveKind.ALL_GATHER, level.size, level.size * split, rounds, name)
    return from_all_gather(kind, gathered)


def _leg_round(axes: tuple[Axis, ...], leg: _Leg, k: int, split: int) -> Iterable[Transfer]:
    units = [math.prod(axis.size for axis in axes[:i]) for i in range(len(axes))]
    unit = units[leg.axis_index]
    moves = two_way_transfers(leg.axis, k)
    for base in _ranks(axes, units, [i for i in range(len(axes)) if i != leg.axis_index]):
        fixed = base - sum(base // units[i] % axes[i].size * units[i] for i in leg.before)
        gathered = [fixed + rank for rank in _ranks(axes, units, list(leg.before))]
        for src, dst, block, half in moves:
            halves = (0, 1) if half is None else (half,)
            ids = tuple((rank + block * unit) * split + leg.part * 2 + part for rank in gathered for part in halves)
            yield Transfer(base + src * unit, base + dst * unit, ids)


def _ranks(axes: tuple[Axis, ...], units: list[int], over: list[int]) -> list[int]:
    """The ranks that vary along the axes ``over`` and are 0 along the others."""
    ranks = [0]
    for i in over:
        ranks = [rank + coordinate * units[i] for coordinate in range(axes[i].size) for rank in ranks]
    return ranks


BUCKET = Algorithm(
    "bucket",
    lambda kind, level, size: _work(kind, level, size, len(axes_of(level))),
    lambda kind, level, chunks: _build(kind, level, len(axes_of(level)), "bucket"),
)
DIMENSION_ORDERED = Algorithm(
    "dimension_ordered",
    lambda kind, level, size: _work(kind, level, size, 1),
    lambda kind, level, chunks: _build(kind, level, 1, "dimension_ordered"),
)
