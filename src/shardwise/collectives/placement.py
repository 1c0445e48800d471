"""The part of a network that the groups of one parallel dimension see while all of them communicate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.collectives.shapes import Axis, Grid, Shape, Switch, Tree, with_size
from shardwise.collectives.topology import Level, Topology
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.rules import divisors


@dataclass(frozen=True)
class _Cut:
    """Of one axis: every ``step``-th member, ``count`` of them."""

    step: int
    count: int


def place(topology: Topology, stride: int, degree: int) -> Topology:
    """The network of a group of ranks base + i*stride, i < degree, while all such groups communicate at once.

    Ranks count through the innermost level fastest; on a grid the factors of a degree that the first axis lacks are
    taken from the next, as JAX splits the physical axes of a TPU (mesh_utils). A group that covers a whole wrapped axis
    keeps the ring; a part of it is a line; members ``o`` apart share their links with the o - 1 groups in between.
    Shared ports are divided among those groups; where they do not divide evenly every device is given the share of the
    busiest port, an upper bound. Levels with one member are dropped. A group that straddles a level: see `_straddled`.
    """
    for field, value in (("stride", stride), ("degree", degree)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(field, f"{shown(value)} is not a whole number of at least 1", "give a count")
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
    """What a step and a count over a level are on each of its axes: all the factors that the axis has."""
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
    """The ports left to one of ``skipped`` groups (None: one per device), and how many groups share each.

    Device i of a member uses port i mod ports, so evenly divided ports stay with their group.
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

    Some groups cross a domain's border where others do not, and have more members on one side than on the other; all
    are waited for. Where q of a group's n members are in a domain, their q ports carry all that enters and leaves
    it: (n-q)/n of what a ring passes on. So every domain is given as many members as the poorest one of any group has,
    rounded down to a divisor of what is left of the group, and the rest is further domains: never fewer crossings than
    there are. Switches do not reduce for groups in unequal parts.
    """
    inside = math.prod(cut.count for own in cuts for cut in own)
    levels = []
    for index in range(len(cuts), len(topology.levels)):
        level, below = topology.levels[index], topology.below(index)
        fewest = _fewest_inside(below * level.size, topology.size, stride, degree)
        here = max(members for members in divisors(degree // inside) if members * inside <= fewest)
        if here > 1:
            levels.append(_joined(level, here, stride * inside, below))
        inside *= here
    return levels


def _fewest_inside(domain: int, world: int, stride: int, degree: int) -> int:
    """The fewest members that a group has in a domain (consecutive ranks of a network) in which it has any.

    The groups of ``stride`` neighbours fill a block of ranks; x of its ranks in a domain hold at least x // stride
    members of each group that is there at all.
    """
    if domain == world:
        return degree
    block, fewest = stride * degree, degree
    for start in range(0, min(world, math.lcm(block, domain)), block):
        first, last = domain - start % domain, (start + block) % domain or domain
        if first < block:
            fewest = min(fewest, max(1, min(first, last, domain) // stride))
    return fewest


def _joined(level: Level, count: int, apart: int, below: int) -> Level:
    """``count`` parts of a group, ``apart`` ranks from one to the next, joined by a level that the group straddles."""
    _, share = _own_ports(level.ports, below, below)
    apart = -(-apart // below)
    shape: Shape = Switch(count)
    if isinstance(level.shape, Grid):
        # A line in rank order: steps there and back pass each link at most so often, along any axis.
        shape = Grid((Axis(count, False, min(2 * apart, max(axis.size for axis in level.shape.axes))),))
    elif isinstance(level.shape, Tree):
        shape = Tree(count, apart)
    return replace(level, shape=shape, ports=None, bandwidth=level.bandwidth / share, in_network=None)
