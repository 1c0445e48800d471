"""Straight to the destination: everything in one round, or pair by pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, gathering, rooted
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, from_all_gather, from_root, schedule_of
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


def direct_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """The longest route's latency, and the blocks on the busiest link."""
    n, shape = level.size, level.shape
    block, hops = size / n, shape.farthest_hops
    all_but_own = (n - 1) * block
    match kind:
        case CollectiveKind.SEND_RECV:
            return Work(shape.next_hops, size * shape.next_load, 1, size, size, (n - 1) * size)
        case CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            # Only offered where every pair has its own link: a + mb.
            return rooted(kind, Work(hops, size, 1, (n - 1) * size, size, (n - 1) * size))
        case CollectiveKind.GATHER:
            return Work(hops, shape.gather_load * block, 1, block, all_but_own, all_but_own)
        case CollectiveKind.SCATTER:
            return Work(hops, shape.scatter_load * block, 1, all_but_own, block, all_but_own)
    exchange = Work(hops, shape.exchange_load * block, 1, all_but_own, all_but_own, n * all_but_own)
    return exchange if kind is CollectiveKind.ALL_TO_ALL else gathering(kind, exchange)


def direct_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    return direct_schedule(kind, level.size)


def direct_schedule(kind: CollectiveKind, n: int) -> Schedule:
    others = [[j for j in range(n) if j != i] for i in range(n)]
    match kind:
        case CollectiveKind.SEND_RECV:
            return schedule_of(kind, n, n, [[Transfer(i, i + 1, (i,)) for i in range(n - 1)]], "direct")
        case CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            copies = [Transfer(0, j, (0,)) for j in others[0]]
            return from_root(kind, schedule_of(CollectiveKind.BROADCAST, n, 1, [copies], "direct"))
        case CollectiveKind.GATHER | CollectiveKind.SCATTER:
            blocks = [Transfer(0, j, (j,)) for j in others[0]]
            return from_root(kind, schedule_of(CollectiveKind.SCATTER, n, n, [blocks], "direct"))
        case CollectiveKind.ALL_TO_ALL:
            exchange = [Transfer(i, j, (i * n + j,)) for i in range(n) for j in others[i]]
            return schedule_of(kind, n, n * n, [exchange], "direct")
    gather = [Transfer(i, j, (i,)) for i in range(n) for j in others[i]]
    return from_all_gather(kind, schedule_of(CollectiveKind.ALL_GATHER, n, n, [gather], "direct"))


DIRECT = Algorithm("direct", direct_work, direct_build)


def pairwise_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(n-1)(a + mb/n): in step d, every rank sends to the rank d places on (Thakur et al. 2005)."""
    n = level.size
    sent = (n - 1) / n * size
    return Work(n - 1, sent, n - 1, sent, sent, n * sent)


def pairwise_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    rounds = [[Transfer(i, (i + far) % n, (i * n + (i + far) % n,)) for i in range(n)] for far in range(1, n)]
    return schedule_of(kind, n, n * n, rounds, "pairwise")


PAIRWISE = Algorithm("pairwise", pairwise_work, pairwise_build)
