"""A network as levels of links, and the part of it that the groups of one parallel dimension see."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwise.collectives.schedule import CollectiveKind
from shardwise.collectives.shapes import (
    Axis,
    FullyConnected,
    Grid,
    Shape,
    Switch,
    Tree,
    grid_sizes,
    shape_of,
    with_size,
)
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.rules import divisors
from shardwise.spec.units import parse

Quantity = int | float | str


# Dimension of every quantity below, and whether it must be above 0.
_QUANTITIES = {
    "bandwidth": ("bytes/s", True),
    "latency": ("seconds", False),
    "ring_step": ("seconds", False),
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

    While they are used, ``efficiency``, ``ramp_bytes`` and ``startup`` replace those of the level.
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
    """One level of a network."""

    shape: Shape
    bandwidth: float
    """Bytes/s in one direction: of a link (grids, fully connected) or of a device's port (switch, tree)."""
    latency: float = 0.0  # seconds per message; on grids per hop
    ring_step: float = 0.0  # seconds per step of large messages in a library's rings through several nodes, if longer
    ports: int | None = None
    """Ports that all devices below one member of this level share; None: each device has its own."""
    startup: float = 0.0  # seconds, once per collective that uses the level
    efficiency: float = 1.0  # the share of the bandwidth that large messages reach
    ramp_bytes: float = 0.0  # V bytes cost as much as V + sqrt(ramp_bytes * V) at full rate
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
    """A network of one or more levels."""

    levels: tuple[Level, ...]  # innermost first; device ranks count through the innermost level fastest
    pipelined_levels: bool = field(default=False, kw_only=True)
    """Whether the library overlaps the levels of a hierarchical collective, as NCCL does: "auto" then prices the
    bandwidth of the levels as their maximum, not their sum."""
    library: str = field(default="any", kw_only=True)
    """The communication library whose algorithms "auto" may choose from; "any": all algorithms."""
    straddles: bool = field(default=False, kw_only=True)
    """Whether the groups on this network have unequal parts on its levels; it is then that of the worst (`place`)."""

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            remedy = "choose one of " + ", ".join(LIBRARIES)
            raise SpecError("topology.library", f"{shown(self.library)} is unknown", remedy)

    def __hash__(self) -> int:
        """A quick hash of what mostly distinguishes networks: a search looks one up thousands of times."""
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


# The algorithms of each communication library: "auto" on a real machine chooses among these only. "any" is our own
# executor, which runs every schedule. A library that offers nothing for a network (such as a grid) is assumed to run
# whatever is cheapest there. NCCL and gloo run gather, scatter and all-to-all as messages all at once.
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


# -- The part of a network that a group sees ----------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """A part of an axis: every ``step``-th member, ``count`` of them."""

    step: int
    count: int


def place(topology: Topology, stride: int, degree: int) -> Topology:
    """The network of a group of ranks base + i*stride, i < degree, while all such groups communicate at once.

    - Ranks count through the innermost level fastest. On a grid the factors of a degree that the first axis lacks are
      taken from the next, as JAX splits the physical axes of a TPU (mesh_utils).
    - A group that covers a whole wrapped axis keeps the ring; a part of the axis is a line. Members ``o`` apart share
      their links with the o - 1 groups in between.
    - Shared ports are divided among those groups. If they do not divide evenly, every device is given the share of the
      busiest port, an upper bound.
    - Levels with one member are dropped. For groups that straddle a level see `_straddled`.
    """
    for name, value in (("stride", stride), ("degree", degree)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(name, f"{shown(value)} is not a whole number of at least 1", "give a count")
    if topology.size % (stride * degree):
        problem = f"groups of {degree} ranks, {stride} apart, do not divide the {topology.size} devices"
        raise SpecError("degree", problem, _nearest(topology, stride, degree))
    cuts = _cut(topology, stride, degree)
    levels = []
    skipped = 1  # groups that lie between two neighbours of one group, below the level
    for index, (level, own) in enumerate(zip(topology.levels, cuts)):
        if any(cut.count > 1 for cut in own):
            levels.append(_part(level, own, skipped, topology.below(index)))
        skipped *= math.prod(cut.step for cut in own)
    straddled = _straddled(topology, stride, degree, cuts)
    return replace(topology, levels=(*levels, *straddled), straddles=bool(straddled))


def _cut(topology: Topology, stride: int, degree: int) -> list[list[_Cut]]:
    """Per level and axis, how many members the group has there and how far apart, up to a level that it straddles."""
    left, wanted = stride, degree
    cuts: list[list[_Cut]] = []
    for level in topology.levels:
        step = math.gcd(left, level.size)
        count = math.gcd(wanted, level.size // step) if left == step else 1
        if step not in (left, level.size) or (left == step and count not in (wanted, level.size // step)):
            break
        cuts.append(_over_axes([size for size, _ in level.shape.strides], step, count))
        left, wanted = left // step, wanted // count
    return cuts


def _over_axes(sizes: list[int], step: int, count: int) -> list[_Cut]:
    """A step and a count over a level, divided over its axes: each takes the factors that it has."""
    cuts = []
    for size in sizes:
        own_step = math.gcd(step, size)
        own_count = math.gcd(count, size // own_step)
        cuts.append(_Cut(own_step, own_count))
        step, count = step // own_step, count // own_count
    return cuts


def _nearest(topology: Topology, stride: int, degree: int) -> str:
    """The remedy: degrees that divide the devices, below and above."""
    fitting = divisors(topology.size // stride) if topology.size % stride == 0 else []
    lower = [str(max(below))] if (below := [d for d in fitting if d < degree]) else []
    upper = [str(min(above))] if (above := [d for d in fitting if d > degree]) else []
    if not lower + upper:
        return "choose degrees whose product is the number of devices"
    return "nearest degrees that fit: " + " and ".join(lower + upper)


def _part(level: Level, cuts: list[_Cut], skipped: int, below: int) -> Level:
    shape = _part_of_shape(level.shape, cuts)
    ports, share = _own_ports(level.ports, skipped, below)
    in_network = level.in_network if isinstance(shape, Switch) else None
    return replace(level, shape=shape, ports=ports, bandwidth=level.bandwidth / share, in_network=in_network)


def _own_ports(ports: int | None, skipped: int, below: int) -> tuple[int | None, int]:
    """The ports left to one of ``skipped`` groups (None: one per device), and how many groups share each port.

    Device i of a member uses port i mod ports, so that ports which divide evenly belong to one group each.
    """
    if ports is None or ports >= below:
        return None, 1
    members = below // skipped
    if ports % skipped == 0:
        return ports // skipped, 1
    if skipped % ports == 0:
        return (1 if members > 1 else None), skipped // ports
    return None, math.ceil(below / ports)


def _part_of_shape(shape: Shape, cuts: list[_Cut]) -> Shape:
    if not isinstance(shape, Grid):
        (cut,) = cuts
        return with_size(shape, cut.count, cut.step)
    axes = []
    for axis, cut in zip(shape.axes, cuts):
        whole = cut.step * cut.count == axis.size
        if cut.count > 1:
            axes.append(Axis(cut.count, axis.wrap and whole, axis.stride * cut.step))
    return Grid(tuple(axes))


# -- groups that straddle ----------------------------------------------------------------------------


def _straddled(topology: Topology, stride: int, degree: int, cuts: list[list[_Cut]]) -> list[Level]:
    """What the groups see of the levels from the first that they straddle: equal parts, as small as the smallest.

    Some groups cross the border of a domain where others do not, with more members on one side than on the other; the
    slowest group counts. If q of a group's n members are in a domain, their q ports carry all that enters and leaves
    it: (n-q)/n of what a ring passes on. So every domain is given the fewest members that any group has in one,
    rounded down to a divisor of what is left of the group; the rest of the group is in further domains. That is never
    fewer crossings than there are. Switches do not reduce for groups in unequal parts.
    """
    inside = math.prod(cut.count for own in cuts for cut in own)
    levels = []
    for index in range(len(cuts), len(topology.levels)):
        level, below = topology.levels[index], topology.below(index)
        fewest = _fewest_inside(below * level.size, topology.size, stride, degree)
        here = max(members for members in divisors(degree // inside) if members * inside <= fewest)
        if here > 1:
            levels.append(_straddled_level(level, here, stride * inside, below))
        inside *= here
    return levels


def _fewest_inside(domain: int, world: int, stride: int, degree: int) -> int:
    """The fewest members that any group has in a domain (``domain`` consecutive ranks) in which it has some.

    ``stride`` neighbouring groups fill a block of ranks. If x ranks of a block are in a domain, each group that has
    members there has at least x // stride.
    """
    if domain == world:
        return degree
    block, fewest = stride * degree, degree
    for start in range(0, min(world, math.lcm(block, domain)), block):
        first, last = domain - start % domain, (start + block) % domain or domain
        if first < block:
            fewest = min(fewest, max(1, min(first, last, domain) // stride))
    return fewest


def _straddled_level(level: Level, count: int, apart: int, below: int) -> Level:
    """``count`` parts of a group, ``apart`` ranks from one to the next, joined by a level that the group straddles."""
    _, share = _own_ports(level.ports, below, below)
    apart = -(-apart // below)
    shape: Shape = Switch(count)
    if isinstance(level.shape, Grid):
        # A line in rank order; the stride bounds how often steps there and back pass a link, along any axis.
        shape = Grid((Axis(count, False, min(2 * apart, max(axis.size for axis in level.shape.axes))),))
    elif isinstance(level.shape, Tree):
        shape = Tree(count, apart)
    return replace(level, shape=shape, ports=None, bandwidth=level.bandwidth / share, in_network=None)
