"""The short questions: how long and how many bytes does a collective, or one message, take?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.collectives.arrays import checked_size
from shardwise.collectives.cost import collective_cost
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.shapes import Switch
from shardwise.collectives.topology import Level, Topology
from shardwise.collectives.work import Work, level_cost

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


@dataclass(frozen=True)
class Volume:
    """Bytes the busiest rank sends and receives, and bytes of all ranks."""

    sent_bytes: Size
    received_bytes: Size
    total_bytes: Size


@dataclass(frozen=True)
class LatencyAndVolume:
    """``latency`` is the whole time in seconds, ``steps`` the rounds one after the other."""

    latency: Size
    volume: Volume
    steps: Size
    algorithm: str


class Link(Protocol):
    """Anything with a bandwidth (bytes/s, one direction) and a latency (seconds)."""

    @property
    def bandwidth(self) -> float: ...

    @property
    def latency(self) -> float: ...


def collective_latency_and_volume(
    kind: str | CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str = "textbook"
) -> LatencyAndVolume:
    """Seconds, bytes and rounds of one collective; the arguments are those of ``collective_cost``."""
    cost = collective_cost(kind, size_bytes, topology, algorithm)
    volume = Volume(cost.sent_bytes, cost.received_bytes, cost.total_bytes)
    return LatencyAndVolume(cost.seconds, volume, cost.steps, cost.algorithm)


def p2p_latency(size_bytes: Any, link: Link) -> LatencyAndVolume:
    """latency + size/bandwidth of one message over ``link`` (a catalogue link, a Level with its ramp, ...)."""
    size = checked_size(size_bytes)
    level = link if isinstance(link, Level) else Level(Switch(2), link.bandwidth, link.latency)
    cost = level_cost(0, level, Work(hops=1, bytes=size))
    seconds = cost.latency_seconds + cost.bandwidth_seconds
    return LatencyAndVolume(seconds, Volume(size, size, size), 1, "direct")
