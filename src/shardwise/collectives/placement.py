"""The part of a network that the groups of one parallel dimension see while all of them communicate."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from shardwise.collectives.shapes import Axis, Grid, Shape, Switch, with_size
from shardwise.collectives.topology import Level, Topology
from shardwise.spec.errors import SpecError, shown


@dataclass(frozen=True)
class _Cut:
    """Of one axis: every ``step``-th member, ``count`` of them."""

    step: int
    count: int


class _Straddles(Exception):
    """A stride or degree that ends inside a level; the text says where."""


def place(topology: Topology, stride: int, degree: int) -> Topology:
    """The network of a group of ranks base + i*stride, i < degree, while all such groups communicate at once.

    Ranks count through the innermost level fastest. A group that covers a whole wrapped axis keeps the
    ring; a part of it is a line; members ``o`` apart share their links with the o - 1 groups in between.
    Shared ports are divided among those groups; where they do not divide evenly every device is given the
    share of the busiest port, an upper bound. Levels with one member are dropped.
    """
    for field, value in (("stride", stride), ("degree", degree)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(field, f"{shown(value)} is not a whole number of at least 1", "give a count")
    try:
        cuts = _cut(topology, stride, degree)
    except _Straddles as where:
        raise SpecError("degree", str(where), _nearest(topology, stride, degree)) from None
    levels = []
    skipped = 1  # groups that lie between two neighbours of one group, below the level
    for index, (level, own) in enumerate(zip(topology.levels, cuts)):
        if any(cut.count > 1 for cut in own):
            levels.append(_part(level, own, skipped, topology.below(index)))
        skipped *= math.prod(cut.step for cut in own)
    return replace(topology, levels=tuple(levels))


def _cut(topology: Topology, stride: int, degree: int) -> list[list[_Cut]]:
    """Per level and axis, how many members the group has there and how far apart."""
    left, wanted = stride, degree
    cuts: list[list[_Cut]] = []
    for index, level in enumerate(topology.levels):
        name = level.name or f"level {index}"
        own = []
        for size, _ in level.shape.strides:
            step = math.gcd(left, size)
            if step not in (left, size):
                raise _Straddles(f"stride {stride} straddles {name} ({size} members)")
            left //= step
            count = math.gcd(wanted, size // step) if left == 1 else 1
            if left == 1 and count not in (wanted, size // step):
                raise _Straddles(f"degree {degree} (stride {stride}) straddles {name} ({size} members)")
            wanted //= count
            own.append(_Cut(step, count))
        cuts.append(own)
    if left > 1 or wanted > 1:
        raise _Straddles(f"stride {stride} times degree {degree} exceeds the {topology.size} devices")
    return cuts


def _nearest(topology: Topology, stride: int, degree: int) -> str:
    """The remedy: degrees that fit, below and above."""
    fitting = []
    for candidate in range(1, topology.size // stride + 1):
        if topology.size % candidate == 0:
            with contextlib.suppress(_Straddles):
                _cut(topology, stride, candidate)
                fitting.append(candidate)
    lower = [str(max(below))] if (below := [d for d in fitting if d < degree]) else []
    upper = [str(min(above))] if (above := [d for d in fitting if d > degree]) else []
    if not lower + upper:
        return "choose degrees inside this one that divide the sizes of the levels"
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
