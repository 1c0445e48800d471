"""What an algorithm demands of a network (`Work` per level), and what that costs (`CollectiveCost`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.collectives.arrays import maximum, square_root
from shardwise.collectives.schedule import CollectiveKind, Schedule
from shardwise.collectives.shapes import Axis, Grid
from shardwise.collectives.topology import Level, Topology

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


@dataclass(frozen=True)
class Work:
    """An algorithm's demands on one level."""

    hops: Size = 0  # one after the other
    bytes: Size = 0  # over the busiest link
    steps: Size = 0
    sent_bytes: Size = 0  # by the busiest rank
    received_bytes: Size = 0  # by the busiest rank
    total_bytes: Size = 0  # by all ranks
    in_network: bool = False
    beside: Size = 0  # bytes over the busiest link while the round waits for a slower level

    def __add__(self, other: Work) -> Work:
        """Both, one after the other, if the same ranks are the busiest in both."""
        return Work(
            self.hops + other.hops,
            self.bytes + other.bytes,
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.total_bytes + other.total_bytes,
            self.in_network or other.in_network,
            self.beside + other.beside,
        )

    def mirrored(self) -> Work:
        """The same rounds backwards in time: senders receive."""
        return replace(self, sent_bytes=self.received_bytes, received_bytes=self.sent_bytes)


@dataclass(frozen=True)
class LevelCost:
    """One level's part of a collective's cost."""

    level_name: str
    level_index: int
    hops: Size
    bytes: Size  # over the busiest link
    latency_seconds: Size
    bandwidth_seconds: Size
    busy_seconds: Size  # how long the busiest link is busy, including while a round waits for another level


@dataclass(frozen=True)
class CollectiveCost:
    """The time and traffic of a collective; every number is an array if the size was one."""

    latency_seconds: Size
    bandwidth_seconds: Size
    steps: Size
    sent_bytes: Size  # by the busiest rank
    received_bytes: Size  # by the busiest rank
    total_bytes: Size  # by all ranks
    algorithm: str
    exact: bool  # whether the closed form equals the price of the algorithm's schedule
    levels: tuple[LevelCost, ...] = ()

    @property
    def seconds(self) -> Size:
        return self.latency_seconds + self.bandwidth_seconds


COST_FIGURES = ("latency_seconds", "bandwidth_seconds", "steps", "sent_bytes", "received_bytes", "total_bytes")


def link_figures(level: Level, in_network: bool) -> tuple[float, float, float]:
    """Rate, ramp and startup of a level's links, or with ``in_network`` of its switches that reduce."""
    helped = level.in_network if in_network else None
    if helped is None:
        return level.rate, level.ramp_bytes, level.startup
    return level.bandwidth * helped.efficiency, helped.ramp_bytes, helped.startup


def level_cost(index: int, level: Level, work: Work | None) -> LevelCost:
    """hops * latency + startup, and (V + sqrt(ramp*V)) / rate.

    The ramp is the fill time of a pipeline cut into chunks of the best size, 2 sqrt(a b m) (Thakur et al.
    2005; Chan et al. 2007), written as bytes; it makes half the bandwidth at V = ramp_bytes.
    """
    name = level.name or f"level {index}"
    if work is None:
        return LevelCost(name, index, 0, 0, 0.0, 0.0, 0.0)
    rate, ramp_bytes, startup = link_figures(level, work.in_network)

    def seconds(moved: Size) -> Size:
        return (moved + (square_root(ramp_bytes * moved) if ramp_bytes else 0.0)) / rate

    latency_seconds, moving = work.hops * level.latency + startup, seconds(work.bytes)
    busy = moving if isinstance(work.beside, int) and not work.beside else seconds(work.bytes + work.beside)
    return LevelCost(name, index, work.hops, work.bytes, latency_seconds, moving, busy)


def settle(
    topology: Topology, used: Mapping[int, Work], volume: Work, algorithm: str, exact: bool, overlapped: bool = False
) -> CollectiveCost:
    """The cost of the ``used`` levels, and of ``volume``, which carries steps and bytes per rank.

    With ``overlapped`` the bandwidth time is that of the slowest level, not the sum.
    """
    levels = tuple(level_cost(i, level, used.get(i)) for i, level in enumerate(topology.levels))
    latency: Size = 0.0
    bandwidth: Size = 0.0
    for level in levels:
        latency = latency + level.latency_seconds
        seconds = level.bandwidth_seconds
        bandwidth = maximum(bandwidth, seconds) if overlapped else bandwidth + seconds
    sent, received, total = volume.sent_bytes, volume.received_bytes, volume.total_bytes
    return CollectiveCost(latency, bandwidth, volume.steps, sent, received, total, algorithm, exact, levels)


@dataclass(frozen=True)
class Algorithm:
    """A way to run some collectives on one level."""

    name: str
    work: Callable[[CollectiveKind, Level, Size], Work]  # the closed form, for a size in bytes
    build: Callable[[CollectiveKind, Level, int], Schedule] | None = None
    """Makes the schedule, with so many chunks; None: it has a price alone, as what runs inside the switch."""
    chunks: Callable[[CollectiveKind, Level, Size], Size] | None = None
    """The best number of chunks for a size in bytes; None if the algorithm is not pipelined."""


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
    """``rounds`` steps to a neighbour, in which every rank sends and receives ``sent`` bytes in all."""
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
    """One-bits in all the numbers 0 to n-1, which is how often the chunks of a binomial scatter travel."""
    return sum(n // 2 ** (j + 1) * 2**j + max(0, n % 2 ** (j + 1) - 2**j) for j in range(n.bit_length()))


def _in_network(written_back: bool, kind: CollectiveKind, level: Level, size: Size) -> Work:
    """All-reduce: 2a + mb, up the tree of switches and down again (SHARP: Bloch et al. 2017), or 2a + m(1+1/n)b if
    each device writes its 1/n of the sum back to be multicast (NVLS: NCCL src/graph/tuning.cc). Others: a + mb."""
    n = level.size
    if kind is not CollectiveKind.ALL_REDUCE:
        return rooted(kind, Work(1, size, 1, size, size, (n - 1) * size, in_network=True))
    moved = size * (1 + 1 / n) if written_back else size
    return Work(2, moved, 2, moved, moved, n * moved, in_network=True)


NVLS = Algorithm("nvls", partial(_in_network, True))
SHARP = Algorithm("sharp", partial(_in_network, False))
