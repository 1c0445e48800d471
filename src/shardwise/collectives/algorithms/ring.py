"""Neighbour to neighbour: the ring, the ring in both directions, and the line.

Chunk r starts at rank r and is passed on until everyone has it; reduce-scatter is the same backwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, gathering
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, from_all_gather, schedule_of
from shardwise.collectives.shapes import Axis, Grid
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


def ring_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    n, shape = level.size, level.shape
    if kind is CollectiveKind.ALL_TO_ALL:
        # Round r still carries n-r blocks over every link: (n-1)a + (n-1)/2 mb.
        sent = (n - 1) / 2 * size
        return Work((n - 1) * shape.step_hops, sent * shape.step_load, n - 1, sent, sent, n * sent)
    # (n-1)(a + mb/n): Thakur et al. 2005; bus factor (n-1)/n of nccl-tests PERFORMANCE.md.
    sent = (n - 1) / n * size
    once = Work((n - 1) * shape.step_hops, sent * shape.step_load, n - 1, sent, sent, n * sent)
    return gathering(kind, once)


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


def two_way_rounds(axis: Axis) -> tuple[int, bool]:
    """Rounds of an all-gather that uses both directions, and whether the last one moves half blocks.

    A ring halves the distance; on an even one the last block comes half from either side (jax
    scaling-book). A line needs n-1 rounds, whatever it does: the ends are n-1 hops apart.
    """
    return (axis.size // 2, axis.size % 2 == 0) if axis.is_ring else (axis.size - 1, False)


def two_way_sent(axis: Axis) -> int:
    """Blocks the busiest rank sends: inside a line of three or more, its own goes both ways."""
    return axis.size - 1 if axis.is_ring or axis.size <= 2 else axis.size + 1


def two_way_transfers(axis: Axis, round_index: int) -> list[tuple[int, int, int, int | None]]:
    """(src, dst, block, half) of one round of an all-gather in both directions; half None: all of it."""
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
    axis = _only_axis(level)
    n = axis.size
    rounds, _ = two_way_rounds(axis)
    # ring: floor(n/2)a + (n-1)/(2n)mb; line: (n-1)(a + mb/n).
    link_blocks = (n - 1) / 2 if axis.is_ring else n - 1
    block = size / n
    sent, received = two_way_sent(axis) * block, (n - 1) * block
    once = Work(rounds * axis.stride, link_blocks * axis.load * block, rounds, sent, received, n * received)
    return gathering(kind, once)


def two_way_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    axis = _only_axis(level)
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


def _only_axis(level: Level) -> Axis:
    assert isinstance(level.shape, Grid)
    (axis,) = level.shape.live
    return axis


BIDIRECTIONAL_RING = Algorithm("bidirectional_ring", two_way_work, two_way_build)
LINE = Algorithm("line", two_way_work, two_way_build)
