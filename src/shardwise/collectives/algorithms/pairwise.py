"""Straight to the destination, in one round or pair by pair; and partners at doubling distances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.schedule import CollectiveKind, Schedule, Transfer, from_all_gather, from_root, schedule_of
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Algorithm, Work, bits_below, even, gathering, log2_ceil, log2_floor, rooted

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


DIRECT = Algorithm("direct", direct_work, lambda kind, level, chunks: direct_schedule(kind, level.size))


def pairwise_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(n-1)(a + mb/n): in step d, every rank sends to the rank d places on (Thakur et al. 2005)."""
    n = level.size
    return even(level, n - 1, (n - 1) / n * size)


def pairwise_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    rounds = [[Transfer(i, (i + far) % n, (i * n + (i + far) % n,)) for i in range(n)] for far in range(1, n)]
    return schedule_of(kind, n, n * n, rounds, "pairwise")


PAIRWISE = Algorithm("pairwise", pairwise_work, pairwise_build)


# -- Partners at doubling distances: recursive halving-doubling (Rabenseifner) and Bruck's rotations


def _fold(n: int, p: int, chunks: tuple[int, ...]) -> tuple[list[Transfer], list[Transfer]]:
    """Two rounds: the ranks from p on give all they have to the first ones, and later get the result back."""
    fold = [Transfer(p + i, i, chunks, reduce=True) for i in range(n - p)]
    return fold, [Transfer(i, p + i, chunks) for i in range(n - p)]


def halving_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """2 floor(log2 n)a + 2(p-1)/p mb, p = 2^floor(log2 n), + 2(a + mb) to fold other n in (Rabenseifner 2004)."""
    n, power = level.size, log2_floor(level.size)
    p = 2**power
    folded = 0 if n == p else 1
    rounds = 2 * power + 2 * folded
    data = 2 * (p - 1) / p * size
    busiest = data + folded * size
    return Work(rounds, data + 2 * folded * size, rounds, busiest, busiest, 2 * (n - 1) * size)


def halving_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n, power = level.size, log2_floor(level.size)
    p = 2**power
    fold, unfold = _fold(n, p, tuple(range(p)))
    doubling = []
    for distance in (2**j for j in range(power)):
        # Rank i holds the aligned run of `distance` chunks around i and swaps it with its partner's.
        runs = [tuple(range(i - i % distance, i - i % distance + distance)) for i in range(p)]
        doubling.append([Transfer(i, i ^ distance, runs[i]) for i in range(p)])
    gathered = schedule_of(CollectiveKind.ALL_GATHER, p, p, doubling, "halving_doubling")
    inner = from_all_gather(CollectiveKind.ALL_REDUCE, gathered)
    return schedule_of(kind, n, p, [fold, *inner.rounds, unfold], "halving_doubling")


HALVING_DOUBLING = Algorithm("halving_doubling", halving_work, halving_build)


def doubling_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """log2(p)(a + mb), p = 2^floor(log2 n), + 2(a + mb) to fold other n in (Thakur et al. 2005)."""
    n, power = level.size, log2_floor(level.size)
    p = 2**power
    folded = 0 if n == p else 1
    rounds = power + 2 * folded
    busiest = (power + folded) * size
    return Work(rounds, rounds * size, rounds, busiest, busiest, (p * power + 2 * (n - p)) * size)


def doubling_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    """Partners swap all they have and both add: a + b and b + a, so that all end with equal bits."""
    n, power = level.size, log2_floor(level.size)
    p = 2**power
    fold, unfold = _fold(n, p, (0,))
    swaps = [[Transfer(i, i ^ 2**j, (0,), reduce=True) for i in range(p)] for j in range(power)]
    return schedule_of(kind, n, 1, [fold, *swaps, unfold], "recursive_doubling")


RECURSIVE_DOUBLING = Algorithm("recursive_doubling", doubling_work, doubling_build)


def bruck_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """ceil(log2 n) rounds for any n (Bruck et al. 1997)."""
    n = level.size
    rounds = log2_ceil(n)
    if kind is CollectiveKind.ALL_TO_ALL:
        # A block is sent once for every one-bit of its distance: about m/2 ceil(log2 n).
        return even(level, rounds, bits_below(n) / n * size)
    return gathering(kind, even(level, rounds, (n - 1) / n * size))


def bruck_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    distances = [2**j for j in range(log2_ceil(n))]
    if kind is CollectiveKind.ALL_TO_ALL:
        rounds = [[_rotate(i, distance, n) for i in range(n)] for distance in distances]
        return schedule_of(kind, n, n * n, rounds, "bruck")

    def held(i: int, distance: int) -> tuple[int, ...]:
        return tuple((i + offset) % n for offset in range(min(distance, n - distance)))

    gather = [[Transfer(i, (i - far) % n, held(i, far)) for i in range(n)] for far in distances]
    return from_all_gather(kind, schedule_of(CollectiveKind.ALL_GATHER, n, n, gather, "bruck"))


def _rotate(rank: int, distance: int, n: int) -> Transfer:
    """Sends on every block whose way contains ``distance`` as a power of two; it has already gone the smaller ones."""
    blocks = []
    for way in (way for way in range(n) if way & distance):
        source = (rank - way % distance) % n
        blocks.append(source * n + (source + way) % n)
    return Transfer(rank, (rank + distance) % n, tuple(blocks))


BRUCK = Algorithm("bruck", bruck_work, bruck_build)
