"""What an algorithm is, how one collective's cost follows from another's, and reduction inside the switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule
from shardwise.collectives.shapes import Axis, Grid
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


def even(level: Level, rounds: int, sent: Size) -> Work:
    """Rounds of one step to a neighbour, in which every rank sends and receives ``sent`` bytes in all."""
    shape = level.shape
    return Work(rounds * shape.step_hops, sent * shape.step_load, rounds, sent, sent, level.size * sent)


def axes_of(level: Level) -> tuple[Axis, ...]:
    """The axes of a grid that have more than one member."""
    assert isinstance(level.shape, Grid)
    return level.shape.live


def log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def log2_floor(n: int) -> int:
    return n.bit_length() - 1


def bits_below(n: int) -> int:
    """One-bits in all the numbers 0 .. n-1: how often the chunks of a binomial scatter travel."""
    return sum(n // 2 ** (j + 1) * 2**j + max(0, n % 2 ** (j + 1) - 2**j) for j in range(n.bit_length()))


def _in_network(written_back: bool, kind: CollectiveKind, level: Level, size: Size) -> Work:
    """All-reduce: 2a + mb, up the tree of switches and down again (SHARP: Bloch et al. 2017), or 2a + m(1+1/n)b where
    a device writes back its 1/n of the sum, to be multicast (NVLS: NCCL src/graph/tuning.cc). Others: a + mb."""
    n = level.size
    if kind is not CollectiveKind.ALL_REDUCE:
        return rooted(kind, Work(1, size, 1, size, size, (n - 1) * size, in_network=True))
    moved = size * (1 + 1 / n) if written_back else size
    return Work(2, moved, 2, moved, moved, n * moved, in_network=True)


NVLS = Algorithm("nvls", partial(_in_network, True))
SHARP = Algorithm("sharp", partial(_in_network, False))
