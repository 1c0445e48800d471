"""A network as a list of levels, innermost first: NVLink inside, then InfiniBand, then whatever joins pods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.shapes import Axis, FullyConnected, Grid, Shape, Switch, Tree, grid_sizes, shape_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import parse

Quantity = int | float | str


# Dimension of every quantity below, and whether it must be above 0.
_QUANTITIES = {
    "bandwidth": ("bytes/s", True),
    "latency": ("seconds", False),
    "startup": ("seconds", False),
    "efficiency": ("share", True),
    "ramp_bytes": ("bytes", False),
}


def _parse_quantities(target: InNetwork | Level, path: str) -> None:
    for name, (dimension, positive) in _QUANTITIES.items():
        if not hasattr(target, name):
            continue
        value = getattr(target, name)
        number = float(parse(value, dimension, f"{path}.{name}"))
        if number < 0 or (positive and number == 0):
            least = "positive" if positive else "zero or more"
            raise SpecError(f"{path}.{name}", f"{shown(value)} is not {least}", f"give a {least} quantity")
        object.__setattr__(target, name, number)


@dataclass(frozen=True)
class InNetwork:
    """Switches that reduce and multicast: NVLink SHARP ("nvls") or InfiniBand SHARP ("sharp").

    ``efficiency``, ``ramp_bytes`` and ``startup`` take the place of the level's own while it is used.
    """

    kind: str
    efficiency: float = 1.0
    ramp_bytes: float = 0.0
    startup: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("nvls", "sharp"):
            raise SpecError("topology.in_network", f"{shown(self.kind)} is unknown", "choose nvls or sharp")
        _parse_quantities(self, "topology.in_network")


@dataclass(frozen=True)
class Level:
    """One level of a network.

    ``bandwidth`` is bytes/s in one direction: of one link (grids, fully connected) or of one device's
    port (switch, tree). ``latency`` is seconds per message, on grids per hop. ``ports`` is how many ports
    all devices below one member of this level share (None: each device has its own). ``startup`` is
    paid once per collective that uses the level. Large messages reach ``efficiency`` of the bandwidth;
    V bytes cost as much as V + sqrt(ramp_bytes * V).
    """

    shape: Shape
    bandwidth: float
    latency: float = 0.0
    ports: int | None = None
    startup: float = 0.0
    efficiency: float = 1.0
    ramp_bytes: float = 0.0
    in_network: InNetwork | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _parse_quantities(self, "topology")
        ports: object = self.ports
        if ports is not None and (isinstance(ports, bool) or not isinstance(ports, int) or ports < 1):
            problem = f"{shown(ports)} is not a count of ports"
            raise SpecError("topology.ports", problem, "give 1 or more, or leave it out")

    @property
    def size(self) -> int:
        return self.shape.size

    @property
    def rate(self) -> float:
        """Bytes/s that large messages reach on one link."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Topology:
    """Levels, innermost first; device ranks count through the innermost level fastest.

    ``pipelined_levels`` says that the library overlaps the levels of a hierarchical collective, as NCCL
    does: "auto" then prices the levels' bandwidth as the maximum instead of the sum. ``library`` names the
    communication library whose algorithms "auto" may choose from ("any": all of them). ``straddles``: the groups
    whose network this is have unequal parts on its levels, and it is that of the worst (`place`).
    """

    levels: tuple[Level, ...]
    pipelined_levels: bool = field(default=False, kw_only=True)
    library: str = field(default="any", kw_only=True)
    straddles: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            remedy = "choose one of " + ", ".join(LIBRARIES)
            raise SpecError("topology.library", f"{shown(self.library)} is unknown", remedy)

    def __hash__(self) -> int:
        """Of what distinguishes networks, not of every field: a search looks one up thousands of times."""
        return hash(tuple((level.name, level.size) for level in self.levels))

    @property
    def size(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def name(self) -> str:
        """line, ring, mesh, torus2d, torus3d, tree, switch, fully_connected or hierarchical."""
        live = [level for level in self.levels if level.size > 1] or list(self.levels[:1])
        return "hierarchical" if len(live) > 1 else live[0].shape.name if live else "switch"

    def below(self, index: int) -> int:
        """Devices below one member of level ``index``."""
        return math.prod(level.size for level in self.levels[:index])

    def sharing(self, index: int) -> int:
        """Devices on the busiest port of level ``index`` when all devices below a member use it."""
        ports = self.levels[index].ports
        return 1 if ports is None else math.ceil(self.below(index) / ports)

    @classmethod
    def line(cls, n: int, bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Grid((Axis(n),)), bandwidth, latency),))

    @classmethod
    def ring(cls, n: int, bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Grid((Axis(n, wrap=True),)), bandwidth, latency),))

    @classmethod
    def tree(cls, n: int, bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Tree(n), bandwidth, latency),))

    @classmethod
    def switch(cls, n: int, bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Switch(n), bandwidth, latency),))

    @classmethod
    def fully_connected(cls, n: int, bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(FullyConnected(n), bandwidth, latency),))

    @classmethod
    def mesh(cls, shape: str | tuple[int, ...], bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Grid(tuple(Axis(n) for n in grid_sizes(shape))), bandwidth, latency),))

    @classmethod
    def torus(cls, shape: str | tuple[int, ...], bandwidth: Quantity, latency: Quantity = 0.0) -> Topology:
        return cls((_level(Grid(tuple(Axis(n, True) for n in grid_sizes(shape))), bandwidth, latency),))

    @classmethod
    def hierarchical(
        cls,
        sizes: Sequence[int | str | tuple[int, ...]],
        bandwidths: Sequence[Quantity],
        latencies: Sequence[Quantity],
        shapes: Sequence[str | Shape] | None = None,
    ) -> Topology:
        """Levels innermost first; a shape is a name ("switch", "ring", "torus", ...) or a Shape."""
        named: Sequence[str | Shape] = shapes if shapes is not None else ["switch"] * len(sizes)
        if not len(sizes) == len(bandwidths) == len(latencies) == len(named):
            counts = f"{len(sizes)} sizes, {len(bandwidths)} bandwidths, {len(latencies)} latencies"
            problem = f"lists of unequal length: {counts}, {len(named)} shapes"
            raise SpecError("topology", problem, "give one of each per level")
        made = (shape_of(shape, size) if isinstance(shape, str) else shape for shape, size in zip(named, sizes))
        return cls(tuple(map(_level, made, bandwidths, latencies)))


def _level(shape: Shape, bandwidth: Quantity, latency: Quantity) -> Level:
    return Level(shape, bandwidth, latency)  # type: ignore[arg-type]  # text is parsed by Level


# The algorithms of a communication library: "auto" on a real machine chooses among these only. "any" is our own
# executor, which runs every schedule. A library that offers nothing for a network (a grid, say) is assumed to run
# whatever is cheapest there. Both libraries run gather, scatter and all-to-all as messages all at once.
_AT_ONCE = dict.fromkeys(
    (CollectiveKind.SEND_RECV, CollectiveKind.GATHER, CollectiveKind.SCATTER, CollectiveKind.ALL_TO_ALL), ("direct",)
)
LIBRARIES: dict[str, dict[CollectiveKind, tuple[str, ...]]] = {
    "any": {},
    # NCCL src/graph/tuning.cc and doc: ring, tree (all-reduce only), NVLS, CollNet; grouped sends and receives.
    "nccl": {
        **_AT_ONCE,
        CollectiveKind.BROADCAST: ("chain",),
        CollectiveKind.REDUCE: ("chain",),
        CollectiveKind.ALL_REDUCE: ("ring", "parallel_rings", "double_binary_tree", "nvls", "sharp"),
        CollectiveKind.ALL_GATHER: ("ring", "parallel_rings"),
        CollectiveKind.REDUCE_SCATTER: ("ring", "parallel_rings"),
    },
    # gloo/allreduce.cc (ring), allgather.cc (ring), broadcast.cc (binomial), reduce.cc (ring), alltoall.cc, gather.cc
    # and scatter.cc (at once); the engine's reduce-scatter is all-to-all, then sum (engine/collectives/reductions.py).
    "gloo": {
        **_AT_ONCE,
        CollectiveKind.BROADCAST: ("binomial",),
        CollectiveKind.REDUCE: ("scatter_all_gather",),
        CollectiveKind.ALL_REDUCE: ("ring", "flat_ring"),
        CollectiveKind.ALL_GATHER: ("ring", "flat_ring"),
        CollectiveKind.REDUCE_SCATTER: ("direct",),
    },
}

T = TypeVar("T")


def offered(library: str, kind: CollectiveKind, options: Sequence[T], name_of: Callable[[T], str]) -> list[T]:
    """The options that ``library`` offers for ``kind``; all of them where it offers none."""
    allowed = LIBRARIES[library].get(kind)
    if allowed is None:
        return list(options)
    return [option for option in options if name_of(option) in allowed] or list(options)


def runs_levels_in_turn(library: str, kind: CollectiveKind) -> bool:
    """Whether the library goes level by level; NCCL's all-to-all goes straight to every peer, as does all of gloo."""
    return library != "gloo" and not (library == "nccl" and kind is CollectiveKind.ALL_TO_ALL)
