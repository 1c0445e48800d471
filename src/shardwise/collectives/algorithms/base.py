"""What every algorithm offers, and the relations that give one collective's form from another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


@dataclass(frozen=True)
class Algorithm:
    """A way to run some collectives on one level.

    ``work(kind, level, size_bytes)`` is the closed form. ``build(kind, level, chunks)`` makes the schedule;
    ``chunks`` is the pipeline's depth, which ``chunks(kind, level, size_bytes)`` chooses (None: not pipelined).
    """

    name: str
    work: Callable[[CollectiveKind, Level, Size], Work]
    build: Callable[[CollectiveKind, Level, int], Schedule] | None = None
    chunks: Callable[[CollectiveKind, Level, Size], Size] | None = None


def gathering(kind: CollectiveKind, all_gather: Work) -> Work:
    """The all-gather, reduce-scatter or all-reduce over the same routes."""
    if kind is CollectiveKind.ALL_GATHER:
        return all_gather
    if kind is CollectiveKind.REDUCE_SCATTER:
        return all_gather.mirrored()
    return all_gather.mirrored() + all_gather


def rooted(kind: CollectiveKind, outward: Work) -> Work:
    """``outward`` is a broadcast or a scatter; reduce and gather run it backwards."""
    return outward.mirrored() if kind in (CollectiveKind.REDUCE, CollectiveKind.GATHER) else outward


def log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def log2_floor(n: int) -> int:
    return n.bit_length() - 1


def bits_below(n: int) -> int:
    """One-bits in all the numbers 0 .. n-1: how often the chunks of a binomial scatter travel."""
    return sum(n // 2 ** (j + 1) * 2**j + max(0, n % 2 ** (j + 1) - 2**j) for j in range(n.bit_length()))


# -- Reduction and multicast inside the switch: NVLink SHARP (nvls) and InfiniBand SHARP. Cost only


def _all_reduce(n: int, moved: Size, steps: int = 2) -> Work:
    return Work(2, moved, steps, moved, moved, n * moved, in_network=True)


def _one_way(kind: CollectiveKind, n: int, size: Size) -> Work:
    """Broadcast and reduce: a + mb, one multicast or one reduction in the switch."""
    return rooted(kind, Work(1, size, 1, size, size, (n - 1) * size, in_network=True))


def nvls_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """2a + m(1+1/n)b: the switch reads all of a device's data, and the device writes back its 1/n of the
    sum, which is multicast (NCCL src/graph/tuning.cc, NVLS)."""
    n = level.size
    return _all_reduce(n, size * (1 + 1 / n)) if kind is CollectiveKind.ALL_REDUCE else _one_way(kind, n, size)


def sharp_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """2a + mb: up the tree of switches and down again (Bloch et al. 2017)."""
    n = level.size
    return _all_reduce(n, size) if kind is CollectiveKind.ALL_REDUCE else _one_way(kind, n, size)


NVLS = Algorithm("nvls", nvls_work)
SHARP = Algorithm("sharp", sharp_work)
