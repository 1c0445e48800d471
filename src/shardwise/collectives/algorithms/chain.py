"""Pipelines from the root: down a chain, or over a grid along a dimension-ordered spanning tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, rooted
from shardwise.collectives.arrays import best_chunks
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, from_root, schedule_of
from shardwise.collectives.shapes import Axis, Grid
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size

_BLOCKS = (CollectiveKind.GATHER, CollectiveKind.SCATTER)


def pipeline_chunks(level: Level, depth: int, size: Size) -> Size:
    """The best number of chunks for a pipeline ``depth`` steps deep."""
    step_seconds = level.shape.step_hops * level.latency
    return best_chunks(depth - 1, step_seconds, level.shape.step_load * size / level.rate)


def chain_chunks(kind: CollectiveKind, level: Level, size: Size) -> Size:
    return 1 if kind in _BLOCKS else pipeline_chunks(level, level.size - 1, size)


def chain_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    n, shape = level.size, level.shape
    if kind in _BLOCKS:
        # (n-1)(a + mb/n): the farthest block leaves first and all arrive in the last round.
        sent = (n - 1) / n * size
        outward = Work((n - 1) * shape.step_hops, sent * shape.step_load, n - 1, sent, sent, (n - 1) / 2 * size)
        return rooted(kind, outward)
    # (n-2+k)(a + mb/k): Thakur et al. 2005; Chan et al. 2007.
    k = chain_chunks(kind, level, size)
    rounds = n - 2 + k
    outward = Work(rounds * shape.step_hops, rounds * size / k * shape.step_load, rounds, size, size, (n - 1) * size)
    return rooted(kind, outward)


def chain_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    if kind in _BLOCKS:
        rounds = [
            [Transfer(i, i + 1, (n - 1 - (t - i),)) for i in range(t + 1) if n - 1 - (t - i) > i] for t in range(n - 1)
        ]
        return from_root(kind, schedule_of(CollectiveKind.SCATTER, n, n, rounds, "chain"))
    edges = [(i, i + 1, i) for i in range(n - 1)]
    return from_root(kind, _pipelined(edges, n, chunks, "chain"))


def _pipelined(edges: list[tuple[int, int, int]], n: int, chunks: int, name: str) -> Schedule:
    """Chunk c crosses an edge (src, dst, depth of src) in round depth + c."""
    deepest = max((depth for _, _, depth in edges), default=-1)
    rounds: list[list[Transfer]] = [[] for _ in range(deepest + chunks)]
    for src, dst, depth in edges:
        for chunk in range(chunks):
            rounds[depth + chunk].append(Transfer(src, dst, (chunk,)))
    return schedule_of(CollectiveKind.BROADCAST, n, chunks, rounds, name)


CHAIN = Algorithm("chain", chain_work, chain_build, chain_chunks)


def _axes(level: Level) -> tuple[Axis, ...]:
    assert isinstance(level.shape, Grid)
    return level.shape.live


def spanning_chunks(kind: CollectiveKind, level: Level, size: Size) -> Size:
    return pipeline_chunks(level, sum(axis.farthest for axis in _axes(level)), size)


def spanning_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(depth-1+k)(a + mb/k), depth = sum of (d-1), or floor(d/2) on wrapped axes (Chan et al. 2007).

    Axis i is in use until the tree's first i+1 axes are done, so the last rounds see only the last axes.
    """
    axes = _axes(level)
    k = spanning_chunks(kind, level, size)
    hops: Size = 0
    load: Size = 0
    rounds: Size = 0
    for index, axis in enumerate(axes):
        count = axis.farthest + (k - 1 if index == 0 else 0)
        rounds = rounds + count
        hops = hops + count * max(later.stride for later in axes[index:])
        load = load + count * max(later.load for later in axes[index:])
    children = sum(2 if axis.is_ring else 1 for axis in axes)
    n = level.size
    return rooted(kind, Work(hops, load * size / k, rounds, children * size, size, (n - 1) * size))


def spanning_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    edges = list(_grow(_axes(level), 0, 0, 1, 0))
    return from_root(kind, _pipelined(edges, level.size, chunks, "spanning_tree"))


def _grow(axes: tuple[Axis, ...], index: int, rank: int, unit: int, depth: int) -> Iterator[tuple[int, int, int]]:
    """Edges of the tree below ``rank``, which spreads along axes[index:]; ``unit`` is the rank's stride there."""
    if index == len(axes):
        return
    axis = axes[index]
    yield from _grow(axes, index + 1, rank, unit * axis.size, depth)
    up = axis.farthest
    for direction, length in ((1, up), (-1, axis.size - 1 - up)):
        here = 0
        for step in range(length):
            there = (here + direction) % axis.size
            src, dst = rank + here * unit, rank + there * unit
            yield src, dst, depth + step
            yield from _grow(axes, index + 1, dst, unit * axis.size, depth + step + 1)
            here = there


SPANNING_TREE = Algorithm("spanning_tree", spanning_work, spanning_build, spanning_chunks)
