"""The links a message uses, with the interleaved groups of strided axes laid out side by side."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from shardwise.collectives.shapes import Axis, FullyConnected, Grid, Shape, Switch, Tree
from shardwise.collectives.topology import Topology

Link = tuple[Hashable, ...]


@dataclass(frozen=True)
class Route:
    """Hops and directed links of one message, all on one level."""

    level: int
    hops: int
    links: tuple[Link, ...]


def expand(topology: Topology) -> tuple[Topology, list[list[int]]]:
    """The network in which no axis is strided, and the rank lists of all the groups that share it.

    A stride of s on an axis stands for s interleaved groups; here they are written out. Only the first axis
    with more than one member is strided in what place() makes; shared ports are dealt out accordingly.
    """
    levels, rails = [], 1
    groups = [[0]]
    unit = 1
    for level in topology.levels:
        ports = None if level.ports is None else level.ports * rails
        levels.append(replace(level, shape=level.shape.expanded(), ports=ports))
        for size, stride in level.shape.strides:
            groups = [
                [member + (index * stride + offset) * unit for index in range(size) for member in group]
                for offset in range(stride)
                for group in groups
            ]
            unit *= size * stride
            rails *= stride
    return replace(topology, levels=tuple(levels)), groups


class Router:
    """Routes between the devices of a topology without strides."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._below = [topology.below(i) for i in range(len(topology.levels))]
        self._known: dict[tuple[int, int], Route] = {}

    def route(self, src: int, dst: int) -> Route:
        known = self._known.get((src, dst))
        if known is None:
            known = self._known[src, dst] = self._find(src, dst)
        return known

    def _find(self, src: int, dst: int) -> Route:
        """The lowest common level's links only; a device's rail is its index below, modulo the ports."""
        for index in reversed(range(len(self._below))):
            level, below = self.topology.levels[index], self._below[index]
            here, there = src // below % level.size, dst // below % level.size
            if here == there:
                continue
            ports = level.ports or below
            rails = src % below % ports, dst % below % ports
            instance = src // (below * level.size)
            hops, path = _path(level.shape, here, there, rails)
            return Route(index, hops, tuple((index, instance, *link) for link in path))
        raise AssertionError(f"{src} sends to itself")


def _path(shape: Shape, src: int, dst: int, rails: tuple[int, int]) -> tuple[int, list[Link]]:
    """Hops and links from member ``src`` to ``dst``; a rail has a network of its own."""
    match shape:
        case Switch():
            return 1, [("out", src, rails[0]), ("in", dst, rails[1])]
        case FullyConnected():
            return 1, [("pair", src, dst, rails[0])]
        case Tree():
            height = (src ^ dst).bit_length()
            up = [("up", h, src >> h, rails[0]) for h in range(height)]
            return 1, [*up, *(("down", h, dst >> h, rails[0]) for h in range(height))]
        case Grid():
            links = [(*link, rails[0]) for link in _walk(shape, src, dst)]
            return len(links), links


def _walk(grid: Grid, src: int, dst: int) -> Iterator[Link]:
    """Dimension-ordered shortest route, axis 0 first."""
    here, unit = src, 1
    for number, axis in enumerate(grid.axes):
        assert axis.stride == 1
        start, end = src // unit % axis.size, dst // unit % axis.size
        distance, direction = _way(axis, start, end)
        for step in range(distance):
            yield number, here, direction
            at, after = (start + direction * step) % axis.size, (start + direction * (step + 1)) % axis.size
            here += (after - at) * unit
        unit *= axis.size


def _way(axis: Axis, start: int, end: int) -> tuple[int, int]:
    if not axis.is_ring:
        return abs(end - start), 1 if end > start else -1
    up = (end - start) % axis.size
    down = axis.size - up
    if up == 0:
        return 0, 1
    if up == down:
        return up, 1 if start % 2 == 0 else -1
    return min(up, down), 1 if up < down else -1
