"""The binomial tree, farthest partner first, so that subtrees are runs of consecutive ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, bits_below, log2_ceil, rooted
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, compose, from_root, reverse, schedule_of
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size

_BLOCKS = (CollectiveKind.GATHER, CollectiveKind.SCATTER)


def binomial_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    n, load = level.size, level.shape.step_load
    rounds = log2_ceil(n)
    if kind in _BLOCKS:
        # ceil(log2 n)a + (n-1)/n mb: Thakur et al. 2005
        sent = (n - 1) / n * size
        largest = max(n - 2 ** (rounds - 1), 2 ** (rounds - 1) // 2)
        total = bits_below(n) / n * size
        return rooted(kind, Work(rounds, sent * load, rounds, sent, largest / n * size, total))
    # ceil(log2 n)(a + mb): Thakur et al. 2005
    outward = Work(rounds, rounds * size * load, rounds, rounds * size, size, (n - 1) * size)
    if kind is not CollectiveKind.ALL_REDUCE:
        return rooted(kind, outward)
    # Reduce, then broadcast; the root receives all in the first half and sends all in the second.
    busiest = rounds * size
    return Work(2 * rounds, 2 * busiest * load, 2 * rounds, busiest, busiest, 2 * (n - 1) * size)


def binomial_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    distances = [2**power for power in reversed(range(log2_ceil(n)))]
    pairs = [[(r, r + far, far) for r in range(0, n - far, 2 * far)] for far in distances]
    if kind in _BLOCKS:
        rounds = [[Transfer(src, dst, tuple(range(dst, min(dst + far, n)))) for src, dst, far in one] for one in pairs]
        return from_root(kind, schedule_of(CollectiveKind.SCATTER, n, n, rounds, "binomial"))
    copies = [[Transfer(src, dst, (0,)) for src, dst, _ in one] for one in pairs]
    broadcast = schedule_of(CollectiveKind.BROADCAST, n, 1, copies, "binomial")
    if kind is CollectiveKind.ALL_REDUCE:
        return compose(kind, reverse(broadcast), broadcast)
    return from_root(kind, broadcast)


BINOMIAL = Algorithm("binomial", binomial_work, binomial_build)
