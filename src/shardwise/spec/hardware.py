"""What a cluster is made of: devices, the hosts they share, their network, storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.spec.codec import Spec, count, quantity, reference, setting
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.errors import SpecError
from shardwise.spec.network import Link, NetworkLevel
from shardwise.spec.presets import preset_field
from shardwise.spec.wiring import Wiring, wiring_from

_PART = {"minimum": 0, "maximum": 1}
DATA_TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8")
# The type whose rate a device without the key's type computes at.
_WIDER = {"fp4": "fp8", "fp6": "fp8", "fp8": "bf16", "int8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32",
          "fp32": "fp64"}  # fmt: skip
MOST_DEVICES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class UnitsTaken(Spec):
    """Shares of the compute units that each kind of transfer takes from the computation it overlaps."""

    collectives: float = setting(0.0, **_PART)
    """Kernels that reduce or copy (NCCL channels)."""
    messages: float | None = setting(None, **_PART)
    """Messages between two ranks; by default as `collectives`."""
    exchanges: float | None = setting(None, **_PART)
    """Exchanges of expert tokens; by default as `collectives` (DeepEP: 20 of 132 SMs, none with RDMA and a receive
    hook)."""
    copies: float = setting(0.0, **_PART)
    """Offloaded data: copy engines move it."""
    in_network: float = setting(0.0, **_PART)
    """Reductions by switches."""


@dataclass(frozen=True, kw_only=True)
class Device(Spec):
    """An accelerator: dense peak FLOP/s per data type, memory, and what communication takes of it."""

    name: str = "custom"
    """Preset it comes from."""
    peak: Mapping[str, float] = setting(dimension="flops/s", above=0, keys=DATA_TYPES)
    """Dense peak FLOP/s per data type."""
    memory: float = quantity("bytes")
    """Memory of the data sheet."""
    driver_memory: float = quantity("bytes", 0, minimum=0)
    """Part of it that the driver reserves: PyTorch sees 79.1 GiB of an H100's 80."""
    memory_bandwidth: float = quantity("bytes/s")
    """Bandwidth of the memory."""
    cache: float = quantity("bytes", 0, minimum=0)
    """Last-level cache."""
    compute_units: int = count(1)
    """SMs, cores or the like."""
    units_taken: UnitsTaken = field(default_factory=UnitsTaken)
    """Shares of these that communication takes."""
    framework_memory: float = quantity("bytes", 1.5 * 2**30, minimum=0)
    """An allowance, not a prediction: on a GPU about 0.5 GiB of driver context and 1 GiB of library workspaces and
    communication buffers; a CPU process has neither."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """How much of the peak it sustains."""
    power: float | None = quantity("watts", None)
    """Power limit."""
    vendor: str = ""
    """Who makes it."""
    source: str = ""
    """Data sheet of these figures."""

    def peak_flops(self, data_type: str) -> float:
        """Dense peak of ``data_type``; a type the device lacks runs at the next wider one's rate."""
        wanted: str | None = data_type
        while wanted is not None:
            if wanted in self.peak:
                return self.peak[wanted]
            wanted = _WIDER.get(wanted)
        return max(self.peak.values())

    def is_slow(self, data_type: str) -> bool:
        """Whether fp32 is more than twice as fast: without instructions for a type it is computed one by one."""
        return 2 * self.peak_flops(data_type) < self.peak_flops("fp32")

    @property
    def usual_precision(self) -> Literal["bf16", "fp32"]:
        """Of a job that names none."""
        return "fp32" if self.is_slow("bf16") else "bf16"

    @property
    def usable_memory(self) -> float:
        """Bytes that a process can have, its driver context and library buffers included."""
        return self.memory - self.driver_memory

    def __hash__(self) -> int:
        """Of the name alone, as prices look a device up thousands of times."""
        return hash(self.name)

    def check(self) -> None:
        if not self.peak:
            raise SpecError("peak", "names no data type", "give at least one, such as {bf16: 100TFLOPS}")
        if self.driver_memory >= self.memory:
            kept, there = f"{self.driver_memory:,.0f}", f"{self.memory:,.0f}"
            raise SpecError("driver_memory", f"{kept} bytes leave nothing of {there}", "give less, or more memory")


UPDATE_BYTES = 30  # of a parameter: gradient, master and two moments read, the three written, a 16-bit weight written


@dataclass(frozen=True, kw_only=True)
class NodeHost(Spec):
    """The processors and the memory of one node, which its devices share. The default is an assumed socket with 8
    channels of DDR4-3200."""

    memory_bandwidth: float = quantity("bytes/s", 204.8e9)
    """Bandwidth of the host's memory."""
    cores: int = count(32)
    """Cores of the node."""
    copied: float = setting(0.8, above=0, maximum=1)
    """Share of the bandwidth that copies reach: a prior, as for the link `ddr5`."""
    updated: float = setting(0.46, above=0, maximum=1)
    """Share that an optimizer's update reaches, given enough cores. CPU-Adam updates 10B parameters in 2.57 s (Ren et
    al. 2021, arXiv 2101.06840, table 4), 117 GB/s of a DGX-2's 256: 12 channels of DDR4-2666."""
    core_updates: float = setting(5e8, above=0)
    """Parameters that a core updates in a second: PyTorch's fused AdamW, measured on one core of a server."""
    source: str = ""
    """Where these figures come from."""

    @property
    def copied_bytes(self) -> float:
        """Bytes per second that copies read and write together."""
        return self.memory_bandwidth * self.copied

    @property
    def updates(self) -> float:
        """Parameters per second that all cores update together."""
        return min(self.memory_bandwidth * self.updated / UPDATE_BYTES, self.cores * self.core_updates)


@dataclass(frozen=True, kw_only=True)
class Storage(Spec):
    """Where checkpoints and data live."""

    name: str = "storage"
    """What reports call it."""
    link: Link = preset_field("link", Link)
    """A node's link to it: `bandwidth` for reads, `outward` times as much for writes."""
    count_per_node: int = count(1)
    """Such links of a node."""
    shared: bool = False
    """Whether all nodes see the same files."""
    total: float | None = quantity("bytes/s", None)
    """Cap of what all nodes reach together, if it is shared."""

    def bandwidth(self, nodes: int, *, out: bool = False) -> float:
        """Bytes per second that ``nodes`` nodes read, or write, together."""
        together = self.link.bandwidth * self.link.efficiency * self.count_per_node * nodes
        together *= self.link.outward if out else 1.0
        return min(together, self.total) if self.total is not None else together


@dataclass(frozen=True, kw_only=True)
class Cluster(Spec):
    """Equal devices joined by network levels, innermost first."""

    device: Device = preset_field("device", Device)
    """The device."""
    levels: tuple[NetworkLevel, ...] = ()
    """Network levels, innermost first."""
    name: str = "custom"
    """Preset it comes from."""
    devices_per_node: int | None = count(None)
    """Devices of a machine; by default those of the innermost level."""
    host_memory: float | None = quantity("bytes", None)
    """Memory of a node's host."""
    host_link: Link | None = preset_field("link", Link, default=None)
    """Link of a device to its host."""
    host: NodeHost = field(default_factory=NodeHost)
    """Processors and memory bandwidth of a node."""
    pipelined_levels: bool = False
    """The communication library overlaps the levels of a hierarchical collective, as NCCL does."""
    library: Literal["any", "nccl", "gloo"] = "any"
    """Communication library of the machine: `auto` picks only algorithms that it offers."""
    storage: tuple[Storage, ...] = ()
    """Storage, that of the nodes first."""
    wiring: Wiring | None = reference(wiring_from, lambda wiring: wiring and wiring.to_dict(), default=None)
    """What is known of each node, where that is more than the levels say."""
    source: str = ""
    """Where these figures come from."""

    def check(self) -> None:
        if not self.levels:
            raise SpecError("levels", "is empty", "give at least one network level")
        if self.devices > MOST_DEVICES:
            raise SpecError("levels", f"make {self.devices:,} devices", f"use at most {MOST_DEVICES:,}")

    def __hash__(self) -> int:
        """Of what distinguishes clusters, not of every field: a search looks one up thousands of times."""
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
        """A device's part of its node's ``host_memory``; infinite where the cluster does not say."""
        return math.inf if self.host_memory is None else self.host_memory / self.node_devices

    def disk_share(self, *, out: bool) -> float:
        """Bytes per second that a device reads from its node's first storage, or writes there, while all others do."""
        return self.storage[0].bandwidth(self.nodes, out=out) / self.devices

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
        raise SpecError("cluster", f"{self.name} is not a torus or mesh", f"give a number of nodes: {self.name}:4")

    def with_devices(self, devices: int) -> Cluster:
        """The same cluster cut or grown to ``devices`` devices: part of one node, or whole nodes."""
        if devices == self.devices:
            return self
        inner = self.levels[0]
        if inner.topology in ("mesh", "torus"):
            raise SpecError("gpus", f"{devices} gives no shape", f"give one: {self.name}:4x4x4")
        if devices <= inner.width:
            outer = (replace(level, size=1) for level in self.levels[1:])
            return replace(self, levels=(replace(inner, size=devices), *outer))
        if devices % inner.width:
            low = devices // inner.width * inner.width
            raise SpecError(
                "gpus",
                f"{devices} is not a whole number of {self.name} nodes of {inner.width}",
                f"use {low} or {low + inner.width}, or set gpus_per_node",
            )
        return self.with_nodes(devices // inner.width)

    def with_node_devices(self, devices: int) -> Cluster:
        """The same nodes with only ``devices`` of their devices in use."""
        inner = self.levels[0]
        if inner.topology in ("mesh", "torus") or devices > inner.width:
            raise SpecError("gpus_per_node", f"{devices} does not fit {self.name}", f"use at most {inner.width}")
        return self.with_level(0, replace(inner, size=devices))

    def run_by_schedules(self) -> Cluster:
        """The same cluster as our own schedule executor sees it."""
        return replace(self, levels=tuple(level.run_by_schedules() for level in self.levels), library="any")

    def with_level(self, index: int, level: NetworkLevel) -> Cluster:
        return replace(self, levels=(*self.levels[:index], level, *self.levels[index + 1 :]))
