"""Links, and the levels of a network made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.spec.codec import Spec, count, quantity, setting
from shardwise.spec.errors import SpecError
from shardwise.spec.presets import preset_field

TopologyName = Literal["line", "ring", "tree", "switch", "mesh", "torus", "fully-connected"]


@dataclass(frozen=True, kw_only=True)
class Link(Spec):
    """A connection of one device."""

    bandwidth: float = quantity("bytes/s")
    """Bytes/s in one direction after line coding; of a host's link, towards the device."""
    latency: float = quantity("seconds", minimum=0)
    """Seconds of one step of a collective, software included."""
    name: str = "custom"
    """Preset it comes from."""
    kind: str = ""
    """Technology."""
    efficiency: float = setting(1.0, above=0, maximum=1)
    """Share of the bandwidth that large messages reach."""
    outward: float = setting(1.0, above=0)
    """Of a host's link: bandwidth from the device, relative to the other direction."""
    duplex: float = setting(1.0, above=0, maximum=1)
    """Share of the bandwidth left to each direction while both are busy."""
    source: str = ""
    """Where the figures come from."""
    assumed: tuple[Literal["bandwidth", "latency", "efficiency"], ...] = ()
    """Figures for which no measured or published value is known."""


@dataclass(frozen=True, kw_only=True)
class InNetworkReduction(Spec):
    """Switches that reduce and multicast (NVLS, SHARP): priced, but without a schedule that our executor runs."""

    kind: Literal["nvls", "sharp"] = "nvls"
    """Which kind."""
    efficiency: float = setting(1.0, above=0, maximum=1)
    """As of a `NetworkLevel`."""
    ramp: float = quantity("bytes", 0, minimum=0)
    """As of a `NetworkLevel`."""
    startup: float = quantity("seconds", 0, minimum=0)
    """As of a `NetworkLevel`."""


@dataclass(frozen=True, kw_only=True)
class Transport(Spec):
    """How messages use a level; each field stands in for that of the `NetworkLevel`."""

    trips: float = setting(1.0, minimum=0)
    overhead: float = quantity("seconds", 0, minimum=0)
    startup: float = quantity("seconds", 0, minimum=0)
    efficiency: float = setting(1.0, above=0, maximum=1)
    ramp: float = quantity("bytes", 0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class NetworkLevel(Spec):
    """A level of the network: members of the level below, joined in a topology. V bytes over the busiest link take (V +
    sqrt(ramp·V)) / (bandwidth·efficiency)."""

    name: str = "network"
    """What reports call it."""
    topology: TopologyName = "switch"
    """How members are joined."""
    size: int | None = count(None)
    """Number of members."""
    shape: tuple[int, ...] = setting((), minimum=1)
    """Axes of a mesh or torus, in place of the size."""
    wrap_multiple: int = count(1)
    """An axis closes to a ring only if its length is a multiple of this (TPU pods)."""
    link: Link | None = preset_field("link", Link, default=None)
    """Link that bandwidth, latency and efficiency are taken from unless they are given."""
    bandwidth: float | None = quantity("bytes/s", None)
    """Of one link on a line, ring, mesh, torus or fully connected level; of one device's port on a switch or tree."""
    latency: float | None = quantity("seconds", None, minimum=0)
    """Seconds of the wire, per step of a collective (per hop on a grid)."""
    efficiency: float | None = setting(None, above=0, maximum=1)
    """Share of the bandwidth that large messages reach."""
    trips: float = setting(1.0, minimum=0)
    """How often a step waits for the wire: libraries that shake hands before they send do so more than once.
    `calibrate` finds it; it stays when the wire changes."""
    overhead: float = quantity("seconds", 0, minimum=0)
    """Seconds of software per step; calibrated as well."""
    startup: float = quantity("seconds", 0, minimum=0)
    """Seconds per collective."""
    ramp: float = quantity("bytes", 0, minimum=0)
    """Bytes in the formula above: how slowly messages reach full bandwidth."""
    ports: int | None = count(None)
    """Ports shared by all devices below one member; by default every device has its own."""
    in_network: InNetworkReduction | None = None
    """Reduction in the switches."""
    schedules: Transport | None = None
    """How messages of our own schedule executor use it, where that differs from the library's."""

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
