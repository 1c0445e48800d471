"""Links, and the levels of a network made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.spec.codec import Spec, count, quantity
from shardwise.spec.errors import SpecError
from shardwise.spec.presets import preset_field

TopologyName = Literal["line", "ring", "tree", "switch", "mesh", "torus", "fully-connected"]


@dataclass(frozen=True, kw_only=True)
class Link(Spec):
    """A connection of one device: bytes/s in one direction after line coding, seconds per message.

    Of a host's link, ``bandwidth`` is what comes to the device; what leaves it has ``outward`` times as much, and each
    direction ``duplex`` times as much while both are busy. ``latency`` is that of one step of a collective as the
    software takes it, not the wire's alone. ``assumed`` names the figures for which no measured or published one is
    known.
    """

    bandwidth: float = quantity("bytes/s")
    latency: float = quantity("seconds", minimum=0)
    name: str = "custom"
    kind: str = ""
    efficiency: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    outward: float = field(default=1.0, metadata={"above": 0})
    duplex: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    source: str = ""
    assumed: tuple[Literal["bandwidth", "latency", "efficiency"], ...] = ()


@dataclass(frozen=True, kw_only=True)
class InNetworkReduction(Spec):
    """Switches that reduce and multicast (NVLS, SHARP): priced, but without a schedule that our executor runs."""

    kind: Literal["nvls", "sharp"] = "nvls"
    efficiency: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    ramp: float = quantity("bytes", 0, minimum=0)
    startup: float = quantity("seconds", 0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Transport(Spec):
    """How messages use a level, in place of the level's own fields; see `NetworkLevel` for each."""

    trips: float = field(default=1.0, metadata={"minimum": 0})
    overhead: float = quantity("seconds", 0, minimum=0)
    startup: float = quantity("seconds", 0, minimum=0)
    efficiency: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    ramp: float = quantity("bytes", 0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class NetworkLevel(Spec):
    """One level of the network: ``size`` members of the level below, joined in a topology.

    ``bandwidth`` is of one link on a line, ring, mesh, torus or fully connected level, and of one
    device's port on a switch or tree. ``ports`` are shared by all devices below one member (omitted:
    every device has its own). ``startup`` is paid once per collective, ``latency`` per step (per hop on a
    grid), and V bytes over the busiest link take (V + sqrt(ramp·V)) / (bandwidth·efficiency).
    ``latency`` is the wire's; a step of a library that shakes hands before it sends waits for it ``trips`` times, and
    spends ``overhead`` in software. `calibrate` finds both; they stay when the wire changes. ``schedules`` is the same
    for this project's own schedule executor, where its speed differs from the library's.
    """

    name: str = "network"
    topology: TopologyName = "switch"
    size: int | None = count(None)
    shape: tuple[int, ...] = field(default=(), metadata={"minimum": 1})
    wrap_multiple: int = count(1)
    link: Link | None = preset_field("link", Link, default=None)
    bandwidth: float | None = quantity("bytes/s", None)
    latency: float | None = quantity("seconds", None, minimum=0)
    efficiency: float | None = field(default=None, metadata={"above": 0, "maximum": 1})
    trips: float = field(default=1.0, metadata={"minimum": 0})
    overhead: float = quantity("seconds", 0, minimum=0)
    startup: float = quantity("seconds", 0, minimum=0)
    ramp: float = quantity("bytes", 0, minimum=0)
    ports: int | None = count(None)
    in_network: InNetworkReduction | None = None
    schedules: Transport | None = None

    def check(self) -> None:
        if self.topology in ("mesh", "torus") and not self.shape:
            raise SpecError("shape", f"is missing for a {self.topology}", "give it like [8, 8]")
        if self.topology not in ("mesh", "torus") and self.shape:
            raise SpecError("shape", f"does not belong to a {self.topology}", "use size, or topology: torus")
        if self.shape and self.size not in (None, math.prod(self.shape)):
            shape = "x".join(map(str, self.shape))
            raise SpecError("shape", f"{shape} is {math.prod(self.shape)} devices, not {self.size}", "leave size out")
        if not self.shape and self.size is None:
            raise SpecError("size", "is missing", "give the number of members the level joins")
        if self.link is None and (self.bandwidth is None or self.latency is None):
            raise SpecError("link", "is missing", "name a link or give bandwidth and latency")

    @property
    def width(self) -> int:
        return math.prod(self.shape) if self.shape else self.size or 1

    @property
    def bandwidth_per_direction(self) -> float:
        assert self.bandwidth is not None or self.link is not None
        return self.bandwidth if self.bandwidth is not None else self.link.bandwidth  # type: ignore[union-attr]

    @property
    def wire_latency(self) -> float:
        assert self.latency is not None or self.link is not None
        return self.latency if self.latency is not None else self.link.latency  # type: ignore[union-attr]

    @property
    def latency_per_step(self) -> float:
        return self.trips * self.wire_latency + self.overhead

    @property
    def reached_share(self) -> float:
        """Share of the bandwidth that large messages reach."""
        if self.efficiency is not None:
            return self.efficiency
        return self.link.efficiency if self.link is not None and self.bandwidth is None else 1.0

    def with_speed(self, bandwidth: float, latency: float) -> NetworkLevel:
        """The level with other links, of whose bandwidth large messages reach the same share."""
        return replace(self, bandwidth=bandwidth, latency=latency, efficiency=self.reached_share)

    def run_by_schedules(self) -> NetworkLevel:
        """The level as our executor's messages see it."""
        return self if self.schedules is None else replace(self, **vars(self.schedules), schedules=None)

    def wraps(self, axis_size: int) -> bool:
        """Whether an axis of this torus closes to a ring (TPU pods: only whole multiples do)."""
        return self.topology in ("ring", "torus") and axis_size % self.wrap_multiple == 0
