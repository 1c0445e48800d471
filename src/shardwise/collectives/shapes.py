"""The wiring of one network level: hops and link loads of the messages on it.

Every shape has the same properties for a group of ``size`` members, numbered in index order:

- ``step_hops``/``step_load``: a round in which every member sends one block to its neighbour;
- ``next_hops``/``next_load``/``closing_hops``: every member sends to the next index, and the last to 0;
- ``farthest_hops``: the longest route;
- ``exchange_load``, ``gather_load``, ``scatter_load``: blocks on the busiest link, in one direction,
  when all members send one block to all others, all to member 0, member 0 to all.

A ``stride`` of s stands for s interleaved groups that communicate at once; hops and loads count those of all groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardwise.spec.errors import SpecError, shown


def _whole(field: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problem = f"{shown(value)} is not a whole number of at least {least}"
        raise SpecError(f"topology.{field}", problem, "give a count")


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: a line, or with ``wrap`` a ring (an axis of two has nothing to wrap around)."""

    size: int
    wrap: bool = False
    stride: int = 1

    def __post_init__(self) -> None:
        _whole("axis.size", self.size)
        _whole("axis.stride", self.stride)

    @property
    def is_ring(self) -> bool:
        return self.wrap and self.size > 2

    @property
    def farthest(self) -> int:
        return self.size // 2 if self.is_ring else self.size - 1

    @property
    def load(self) -> int:
        """Groups on one link in a step to the neighbour; two members on a ring have two ways around."""
        return math.ceil(self.stride / 2) if self.wrap and self.size == 2 else self.stride

    @property
    def back(self) -> int:
        """Hops from the last member to the first."""
        return 1 if self.is_ring else self.size - 1

    @property
    def exchange_load(self) -> int:
        size, stride = self.size, self.stride
        if not self.wrap:
            return stride * (size // 2) * ((size + 1) // 2)
        if size % 2:
            return stride * (size * size - 1) // 8
        return stride * (size * (size - 2) // 8) + math.ceil(stride * size / 4)  # + the ties, split by parity

    @property
    def root_load(self) -> int:
        if not self.wrap:
            return self.stride * (self.size - 1)
        if self.size % 2:
            return self.stride * (self.size - 1) // 2
        return self.stride * (self.size // 2 - 1) + math.ceil(self.stride / 2)


@dataclass(frozen=True)
class Grid:
    """Line, ring, mesh or torus, axis 0 fastest; routes are shortest and go along axis 0 first.

    A tie between the two ways around a ring goes up from an even source coordinate, down from an odd one.
    """

    axes: tuple[Axis, ...]
    disjoint_rings = 1

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def live(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.size > 1)

    @property
    def name(self) -> str:
        axes = self.live
        if len(axes) <= 1:
            return "ring" if any(axis.wrap for axis in axes) else "line"
        return f"torus{len(axes)}d" if all(axis.wrap for axis in axes) else "mesh"

    @property
    def family(self) -> str:
        return self.name if len(self.live) <= 1 else "grid"

    @property
    def step_hops(self) -> int:
        return max((axis.stride for axis in self.live), default=0)

    @property
    def step_load(self) -> int:
        return max((axis.load for axis in self.live), default=0)

    next_load = step_load

    @property
    def next_hops(self) -> int:
        hops, back = 0, 0
        for axis in self.live:
            hops = max(hops, back + axis.stride)
            back += axis.back * axis.stride
        return hops

    @property
    def closing_hops(self) -> int:
        return sum(axis.back * axis.stride for axis in self.live)

    @property
    def farthest_hops(self) -> int:
        return sum(axis.farthest * axis.stride for axis in self.live)

    @property
    def exchange_load(self) -> int:
        return max((axis.exchange_load * (self.size // axis.size) for axis in self.live), default=0)

    @property
    def gather_load(self) -> int:
        return _dimension_ordered_load(self.live)

    @property
    def scatter_load(self) -> int:
        return _dimension_ordered_load(self.live[::-1])

    def expanded(self) -> Grid:
        """The grid in which the interleaved groups of every strided axis are laid out side by side."""
        return Grid(tuple(Axis(axis.size * axis.stride, axis.wrap) for axis in self.axes))

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        return tuple((axis.size, axis.stride) for axis in self.axes)


def _dimension_ordered_load(axes: tuple[Axis, ...]) -> int:
    """Blocks on the busiest link towards the root: those of earlier axes are already funnelled into one line."""
    load, funnelled = 0, 1
    for axis in axes:
        load = max(load, axis.root_load * funnelled)
        funnelled *= axis.size
    return load


class _OneHop:
    """What the shapes share whose latency is per message, whatever the route."""

    size: int
    stride = 1
    step_hops = next_hops = closing_hops = farthest_hops = 1
    disjoint_rings = 1

    @property
    def step_load(self) -> int:
        return self.stride

    next_load = step_load

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        return ((self.size, self.stride),)


@dataclass(frozen=True)
class Switch(_OneHop):
    """Every member has one port, in and out, on a switch that never blocks."""

    size: int
    name = family = "switch"

    def __post_init__(self) -> None:
        _whole("switch.size", self.size)

    @property
    def exchange_load(self) -> int:
        return self.size - 1

    gather_load = scatter_load = exchange_load

    def expanded(self) -> Switch:
        return self


@dataclass(frozen=True)
class Tree(_OneHop):
    """Members are the leaves, in index order, of a binary tree of switches with equal edges."""

    size: int
    stride: int = 1
    name = family = "tree"

    def __post_init__(self) -> None:
        _whole("tree.size", self.size)
        _whole("tree.stride", self.stride)

    @property
    def exchange_load(self) -> int:
        # A subtree of k leaves exchanges k(n-k) blocks with the rest; k nearest n/2 is the busiest edge.
        quarters = [2**power for power in range(self.size.bit_length()) if 2**power < self.size]
        return self.stride * max((k * (self.size - k) for k in quarters), default=0)

    @property
    def gather_load(self) -> int:
        return self.stride * (self.size - 1)

    scatter_load = gather_load

    def expanded(self) -> Tree:
        return Tree(self.size * self.stride)


@dataclass(frozen=True)
class FullyConnected(_OneHop):
    """Every pair of members has its own link."""

    size: int
    name = family = "fully_connected"
    exchange_load = gather_load = scatter_load = 1

    def __post_init__(self) -> None:
        _whole("fully_connected.size", self.size)

    @property
    def disjoint_rings(self) -> int:  # type: ignore[override]  # here it depends on the size
        """Rings through all members that share no link: every link is in one, except for 4 and 6 members (Tillson
        1980)."""
        return max(1, self.size - (2 if self.size in (4, 6) else 1))

    def expanded(self) -> FullyConnected:
        return self


Shape: TypeAlias = Grid | Switch | Tree | FullyConnected


def shape_of(name: str, size: int | str | tuple[int, ...]) -> Shape:
    """A shape by its name; meshes and tori take sizes like (8, 8) or "8x8"."""
    sizes = grid_sizes(size)
    if (name in ("line", "ring") and len(sizes) == 1) or name in ("mesh", "torus", "torus2d", "torus3d"):
        return Grid(tuple(Axis(n, wrap=name.startswith(("ring", "torus"))) for n in sizes))
    simple: dict[str, type[Switch | Tree | FullyConnected]]
    simple = {"switch": Switch, "tree": Tree, "fully_connected": FullyConnected}
    if name in simple and len(sizes) == 1:
        return simple[name](sizes[0])
    if name in simple or name in ("line", "ring"):
        raise SpecError("topology.size", f"a {name} has one size, not {shown(size)}", "give one number")
    names = ("line", "ring", "mesh", "torus", *simple)
    raise SpecError("topology.shape", f"{shown(name)} is not a shape", "choose one of " + ", ".join(names))


def grid_sizes(shape: int | str | tuple[int, ...]) -> tuple[int, ...]:
    """(8, 8) from "8x8", (8, 8), [8, 8] or, with one axis, 8."""
    parts = shape.lower().replace("×", "x").split("x") if isinstance(shape, str) else shape
    try:
        sizes = tuple(int(part) for part in parts) if not isinstance(parts, int) else (parts,)
    except (TypeError, ValueError):
        raise SpecError("topology.shape", f"{shown(shape)} is not a list of sizes", 'write it like "8x8"') from None
    if not sizes or min(sizes) < 1:
        raise SpecError("topology.shape", f"{shown(shape)} has a size below 1", "give sizes of at least 1")
    return sizes


def with_size(shape: Switch | Tree | FullyConnected, size: int, stride: int) -> Shape:
    """The members of ``shape`` that one of ``stride`` interleaved groups of ``size`` sees."""
    if isinstance(shape, Tree):
        return Tree(size, shape.stride * stride)
    return replace(shape, size=size)
