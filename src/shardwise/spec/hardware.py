"""What a cluster is made of: devices, links, network levels, storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.spec import presets
from shardwise.spec.codec import Spec, count, quantity, reference
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.errors import SpecError

DATA_TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8")
TopologyName = Literal["line", "ring", "tree", "switch", "mesh", "torus", "fully-connected"]
MOST_DEVICES = 10_000_000
GRIDS = ("line", "ring", "mesh", "torus")


_PART = {"minimum": 0, "maximum": 1}


@dataclass(frozen=True, kw_only=True)
class UnitsTaken(Spec):
    """Shares of the compute units that each kind of transfer runs on, and keeps from what it overlaps.

    ``collectives`` are reduced or copied by kernels (NCCL channels); ``messages`` between two ranks and ``exchanges``
    of expert tokens take the same unless they are given (DeepEP: 20 of 132 SMs, none with RDMA and a receive hook).
    Copy engines move offloaded data and switches reduce in the network: 0.
    """

    collectives: float = field(default=0.0, metadata=_PART)
    messages: float | None = field(default=None, metadata=_PART)
    exchanges: float | None = field(default=None, metadata=_PART)
    copies: float = field(default=0.0, metadata=_PART)
    in_network: float = field(default=0.0, metadata=_PART)

    def of_messages(self) -> float:
        return self.collectives if self.messages is None else self.messages

    def of_exchanges(self) -> float:
        return self.collectives if self.exchanges is None else self.exchanges


@dataclass(frozen=True, kw_only=True)
class Device(Spec):
    """An accelerator: dense peak FLOP/s per data type, memory, and what communication takes of it.

    ``framework_memory`` is an allowance, not a prediction: on a GPU about 0.5 GiB of driver context and 1 GiB
    of library workspaces and communication buffers; a CPU process has neither.
    """

    name: str = "custom"
    peak: Mapping[str, float] = field(metadata={"dimension": "flops/s", "above": 0, "keys": DATA_TYPES})
    memory: float = quantity("bytes")
    memory_bandwidth: float = quantity("bytes/s")
    cache: float = quantity("bytes", 0, minimum=0)
    compute_units: int = count(1)
    units_taken: UnitsTaken = field(default_factory=UnitsTaken)
    framework_memory: float = quantity("bytes", 1.5 * 2**30, minimum=0)
    efficiency: Efficiency = field(default_factory=Efficiency)
    power: float | None = quantity("watts", None)
    vendor: str = ""
    source: str = ""

    def peak_flops(self, data_type: str) -> float:
        """Dense peak of ``data_type``; a type the device lacks runs at the next wider one's rate."""
        widening = {
            "fp4": "fp8",
            "fp6": "fp8",
            "fp8": "bf16",
            "int8": "bf16",
            "bf16": "fp16",
            "fp16": "fp32",
            "tf32": "fp32",
            "fp32": "fp64",
        }
        wanted: str | None = data_type
        while wanted is not None:
            if wanted in self.peak:
                return self.peak[wanted]
            wanted = widening.get(wanted)
        return max(self.peak.values())

    def check(self) -> None:
        if not self.peak:
            raise SpecError("peak", "names no data type", "give at least one, such as {bf16: 100TFLOPS}")


@dataclass(frozen=True, kw_only=True)
class Link(Spec):
    """A connection of one device: bytes/s in one direction after line coding, seconds per message."""

    bandwidth: float = quantity("bytes/s")
    latency: float = quantity("seconds", minimum=0)
    name: str = "custom"
    kind: str = ""
    efficiency: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class InNetworkReduction(Spec):
    """Switches that reduce and multicast (NVLS, SHARP): cost only, no schedule of ours runs on them."""

    kind: Literal["nvls", "sharp"] = "nvls"
    efficiency: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    ramp: float = quantity("bytes", 0, minimum=0)
    startup: float = quantity("seconds", 0, minimum=0)


def _link(value: Any) -> Link:
    return presets.resolve("link", Link, value)


def _device(value: Any) -> Device:
    return presets.resolve("device", Device, value)


def _short(noun: Any) -> Any:
    return presets.shorten(noun)


def _short_or_none(noun: Any) -> Any:
    return None if noun is None else presets.shorten(noun)


def _link_or_none(value: Any) -> Link | None:
    return None if value is None else _link(value)


@dataclass(frozen=True, kw_only=True)
class NetworkLevel(Spec):
    """One level of the network: ``size`` members of the level below, joined in a topology.

    ``bandwidth`` is of one link on a line, ring, mesh, torus or fully connected level, and of one
    device's port on a switch or tree. ``ports`` are shared by all devices below one member (omitted:
    every device has its own). ``startup`` is paid once per collective, ``latency`` per step (per hop on a
    grid), and V bytes over the busiest link take (V + sqrt(ramp·V)) / (bandwidth·efficiency).
    """

    name: str = "network"
    topology: TopologyName = "switch"
    size: int | None = count(None)
    shape: tuple[int, ...] = field(default=(), metadata={"minimum": 1})
    wrap_multiple: int = count(1)
    link: Link | None = reference(_link_or_none, _short_or_none, default=None)
    bandwidth: float | None = quantity("bytes/s", None)
    latency: float | None = quantity("seconds", None, minimum=0)
    efficiency: float | None = field(default=None, metadata={"above": 0, "maximum": 1})
    startup: float = quantity("seconds", 0, minimum=0)
    ramp: float = quantity("bytes", 0, minimum=0)
    ports: int | None = count(None)
    in_network: InNetworkReduction | None = None

    def check(self) -> None:
        if self.topology in ("mesh", "torus") and not self.shape:
            raise SpecError("shape", f"is missing for a {self.topology}", "give it like [8, 8]")
        if self.topology not in ("mesh", "torus") and self.shape:
            raise SpecError("shape", f"does not belong to a {self.topology}", "use size, or topology: torus")
        if self.shape and self.size not in (None, math.prod(self.shape)):
            shape = "x".join(map(str, self.shape))
            raise SpecError("shape", f"{shape} is {math.prod(self.shape)} devices, not {self.size}", "leave size out")
        if not self.shape and self.size is None:
            raise SpecError("size", "is missing", "say how many members the level joins")
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
    def latency_per_step(self) -> float:
        assert self.latency is not None or self.link is not None
        return self.latency if self.latency is not None else self.link.latency  # type: ignore[union-attr]

    @property
    def reached_share(self) -> float:
        """Share of the bandwidth that large messages reach."""
        if self.efficiency is not None:
            return self.efficiency
        return self.link.efficiency if self.link is not None and self.bandwidth is None else 1.0

    def with_speed(self, bandwidth: float, latency: float) -> NetworkLevel:
        """The level with other links, of which large messages reach the same share."""
        return replace(self, bandwidth=bandwidth, latency=latency, efficiency=self.reached_share)

    def wraps(self, axis_size: int) -> bool:
        """Whether an axis of this torus closes to a ring (TPU pods: only whole multiples do)."""
        return self.topology in ("ring", "torus") and axis_size % self.wrap_multiple == 0


@dataclass(frozen=True, kw_only=True)
class Storage(Spec):
    """Where checkpoints and data live: a link per node, and a cap for the whole cluster if it is shared."""

    name: str = "storage"
    link: Link = reference(_link, _short)
    count_per_node: int = count(1)
    shared: bool = False
    total: float | None = quantity("bytes/s", None)

    def bandwidth(self, nodes: int) -> float:
        """Bytes per second that ``nodes`` nodes reach together."""
        together = self.link.bandwidth * self.link.efficiency * self.count_per_node * nodes
        return min(together, self.total) if self.total is not None else together


@dataclass(frozen=True, kw_only=True)
class Cluster(Spec):
    """Equal devices joined by network levels, innermost first.

    ``library`` is the communication library of the machine: `auto` picks only algorithms that it offers.
    ``pipelined_levels`` says that it overlaps the levels of a hierarchical collective, as NCCL does.
    """

    device: Device = reference(_device, _short)
    levels: tuple[NetworkLevel, ...] = ()
    name: str = "custom"
    devices_per_node: int | None = count(None)
    host_memory: float | None = quantity("bytes", None)
    host_link: Link | None = reference(_link_or_none, _short_or_none, default=None)
    pipelined_levels: bool = False
    library: Literal["any", "nccl"] = "any"
    storage: tuple[Storage, ...] = ()
    source: str = ""

    def check(self) -> None:
        if not self.levels:
            raise SpecError("levels", "is empty", "give at least one network level")
        if self.devices > MOST_DEVICES:
            raise SpecError("levels", f"make {self.devices:,} devices", f"use at most {MOST_DEVICES:,}")

    def __hash__(self) -> int:
        """Of what tells clusters apart, not of every field below: a search looks a cluster up thousands of times."""
        return hash((self.name, self.device.name, tuple(level.width for level in self.levels)))

    @property
    def devices(self) -> int:
        return math.prod(level.width for level in self.levels)

    @property
    def node_devices(self) -> int:
        """Devices of one machine: the innermost level, unless the cluster says otherwise."""
        return min(self.devices_per_node or self.levels[0].width, self.devices)

    @property
    def nodes(self) -> int:
        return max(1, self.devices // self.node_devices)

    @property
    def host_memory_per_device(self) -> float:
        """A device's part of its node's ``host_memory``; without a limit where the cluster does not say."""
        return math.inf if self.host_memory is None else self.host_memory / self.node_devices

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with ``nodes`` members of its innermost level."""
        if nodes < 1:
            raise SpecError("cluster", f"{nodes} nodes", "use 1 or more")
        if len(self.levels) == 1:
            if nodes == 1:
                return self
            remedy = f"use {self.name}" if self.levels[0].topology not in ("mesh", "torus") else "give a shape"
            raise SpecError("cluster", f"{self.name} has no network between nodes for {nodes} of them", remedy)
        above = math.prod(level.width for level in self.levels[2:])
        if nodes % above:
            low = max(above, nodes // above * above)
            raise SpecError(
                "cluster",
                f"{nodes} nodes do not divide over {above} {self.levels[2].name} members",
                f"use {low} or {nodes // above * above + above}",
            )
        return self.with_level(1, replace(self.levels[1], size=nodes // above))

    def with_shape(self, shape: tuple[int, ...]) -> Cluster:
        """The same cluster with its torus or mesh of the given shape."""
        for index, level in enumerate(self.levels):
            if level.topology in ("mesh", "torus"):
                if len(shape) != len(level.shape):
                    raise SpecError(
                        "cluster",
                        f"shape {'x'.join(map(str, shape))} has {len(shape)} axes",
                        f"{self.name} has {len(level.shape)}, such as {'x'.join(map(str, level.shape))}",
                    )
                return self.with_level(index, replace(level, shape=shape))
        raise SpecError("cluster", f"{self.name} is no torus or mesh", f"give a number of nodes: {self.name}:4")

    def with_devices(self, devices: int) -> Cluster:
        """The same cluster cut or grown to ``devices`` devices: part of one node, or whole nodes."""
        if devices == self.devices:
            return self
        inner = self.levels[0]
        if inner.topology in ("mesh", "torus"):
            raise SpecError("gpus", f"{devices} says no shape", f"give one: {self.name}:4x4x4")
        if devices <= inner.width:
            return self.with_level(0, replace(inner, size=devices)).with_nodes(1)._one_node()
        if devices % inner.width:
            low = devices // inner.width * inner.width
            raise SpecError(
                "gpus",
                f"{devices} is no whole number of {self.name} nodes of {inner.width}",
                f"use {low} or {low + inner.width}, or set gpus_per_node",
            )
        return self.with_nodes(devices // inner.width)

    def with_node_devices(self, devices: int) -> Cluster:
        """The same nodes with only ``devices`` of their devices in use."""
        inner = self.levels[0]
        if inner.topology in ("mesh", "torus") or devices > inner.width:
            raise SpecError("gpus_per_node", f"{devices} does not fit {self.name}", f"use at most {inner.width}")
        return self.with_level(0, replace(inner, size=devices))

    def _one_node(self) -> Cluster:
        return replace(self, levels=(self.levels[0], *(replace(level, size=1) for level in self.levels[1:])))

    def with_level(self, index: int, level: NetworkLevel) -> Cluster:
        """The same cluster with another level in the place of one."""
        return replace(self, levels=(*self.levels[:index], level, *self.levels[index + 1 :]))
