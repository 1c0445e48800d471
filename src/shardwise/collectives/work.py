"""What a collective does to a network (Work per level) and what that costs (CollectiveCost)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.collectives.arrays import maximum, square_root
from shardwise.collectives.topology import Level, Topology

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


@dataclass(frozen=True)
class Work:
    """An algorithm's demands on one level: hops one after the other, bytes over the busiest link.

    ``beside`` are bytes that pass it while the round waits for a slower level. ``sent_bytes`` and ``received_bytes``
    are those of the busiest rank, ``total_bytes`` of all ranks.
    """

    hops: Size = 0
    bytes: Size = 0
    steps: Size = 0
    sent_bytes: Size = 0
    received_bytes: Size = 0
    total_bytes: Size = 0
    in_network: bool = False
    beside: Size = 0

    def __add__(self, other: Work) -> Work:
        """One after the other, by ranks that are equally busy in both."""
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
    """One level's part: ``hops`` latencies in a row and ``bytes`` over its busiest link.

    The link is busy for ``busy_seconds``, also while a round waits for another level.
    """

    level_name: str
    level_index: int
    hops: Size
    bytes: Size
    latency_seconds: Size
    bandwidth_seconds: Size
    busy_seconds: Size


@dataclass(frozen=True)
class CollectiveCost:
    """The time and traffic of a collective; every number is an array if the size was one.

    ``sent_bytes`` and ``received_bytes`` are those of the busiest rank, ``total_bytes`` of all ranks.
    ``exact`` says that the closed form equals the price of the algorithm's schedule.
    """

    latency_seconds: Size
    bandwidth_seconds: Size
    steps: Size
    sent_bytes: Size
    received_bytes: Size
    total_bytes: Size
    algorithm: str
    exact: bool
    levels: tuple[LevelCost, ...] = ()

    @property
    def seconds(self) -> Size:
        return self.latency_seconds + self.bandwidth_seconds


COST_FIGURES = ("latency_seconds", "bandwidth_seconds", "steps", "sent_bytes", "received_bytes", "total_bytes")


def link_figures(level: Level, in_network: bool) -> tuple[float, float, float]:
    """Rate, ramp and startup of a level's links, or of its switches that reduce."""
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
    """The cost of ``used`` levels; ``volume`` carries steps and bytes per rank.

    With ``overlapped`` the slowest level's bandwidth hides that of the others.
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
