"""From a root or to one: the binomial tree, two binary trees, chains and spanning trees, scatter + all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.pairwise import DIRECT
from shardwise.collectives.algorithms.rings import RING
from shardwise.collectives.arrays import best_chunks
from shardwise.collectives.schedule import CollectiveKind, Schedule, Transfer, compose, from_root, reverse, schedule_of
from shardwise.collectives.shapes import Axis
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Algorithm, Work, axes_of, bits_below, log2_ceil, rooted

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


# -- The binomial tree, farthest partner first, so that subtrees are runs of consecutive ranks -------

_BLOCKS = (CollectiveKind.GATHER, CollectiveKind.SCATTER)


def binomial_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    n, load = level.size, level.shape.step_load
    rounds = log2_ceil(n)
    if kind in _BLOCKS:
        # ceil(log2 n)a + (n-1)/n mb: Thakur et al. 2005
        sent = (n - 1) / n * size
        largest = max(n - 2 ** (rounds - 1), 2 ** (rounds - 1) // 2)
        total = bits_below(n) / n * size
        return rooted(kind, Work(rounds, sent * load, rounds, sent, largest / n * size, total))
    # ceil(log2 n)(a + mb): Thakur et al. 2005
    outward = Work(rounds, rounds * size * load, rounds, rounds * size, size, (n - 1) * size)
    if kind is not CollectiveKind.ALL_REDUCE:
        return rooted(kind, outward)
    # Reduce, then broadcast; the root receives all in the first half and sends all in the second.
    busiest = rounds * size
    return Work(2 * rounds, 2 * busiest * load, 2 * rounds, busiest, busiest, 2 * (n - 1) * size)


def binomial_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    distances = [2**power for power in reversed(range(log2_ceil(n)))]
    pairs = [[(r, r + far, far) for r in range(0, n - far, 2 * far)] for far in distances]
    if kind in _BLOCKS:
        rounds = [
            [Transfer(src, dst, tuple(range(dst, min(dst + far, n)))) for src, dst, far in partners]
            for partners in pairs
        ]
        return from_root(kind, schedule_of(CollectiveKind.SCATTER, n, n, rounds, "binomial"))
    copies = [[Transfer(src, dst, (0,)) for src, dst, _ in partners] for partners in pairs]
    broadcast = schedule_of(CollectiveKind.BROADCAST, n, 1, copies, "binomial")
    if kind is CollectiveKind.ALL_REDUCE:
        return compose(kind, reverse(broadcast), broadcast)
    return from_root(kind, broadcast)


BINOMIAL = Algorithm("binomial", binomial_work, binomial_build)


# -- All-reduce over two binary trees, each with half the data; a leaf of one is inside the other ----
# Sanders et al. 2009; the trees are those of NCCL's src/graph/trees.cc.


def double_tree_chunks(kind: CollectiveKind, level: Level, size: Size) -> Size:
    return best_chunks(max(1, 2 * log2_ceil(level.size) - 3), level.latency, size / level.rate)


def double_tree_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(2D-1+k)a + (2 + (2D-3)/k)mb, D = ceil(log2 n): its rounds, or a little more.

    In middle rounds a rank inside one tree sends one half-chunk up and two down, and one up as a leaf of the other
    tree: four of m/2k. The first and last rounds together have 4D+2 fewer, as counted in built schedules: exact if n
    is a power of two and chunks are many; other n move slightly less (`test_double_tree.py`).
    """
    n, depth = level.size, log2_ceil(level.size)
    k = double_tree_chunks(kind, level, size)
    rounds, half_chunks = 2 * depth - 1 + k, 4 * k + 4 * depth - 6
    busiest = 2 * size if n > 2 else size
    return Work(rounds, half_chunks * size / (2 * k), rounds, busiest, busiest, 2 * (n - 1) * size)


def double_tree_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    n = level.size
    rounds: list[list[Transfer]] = [[] for _ in range(2 * log2_ceil(n) - 1 + chunks)]
    for tree in range(2):
        parents = [_parent(rank, n, tree) for rank in range(n)]
        heights, depths = _heights(parents), _depths(parents)
        top = max(heights)
        for rank, parent in enumerate(parents):
            if parent is None:
                continue
            for chunk in range(chunks):
                name = (tree * chunks + chunk,)
                rounds[heights[rank] + chunk].append(Transfer(rank, parent, name, reduce=True))
                rounds[top + depths[parent] + chunk].append(Transfer(parent, rank, name))
    return schedule_of(kind, n, 2 * chunks, rounds, "double_binary_tree")


def _parent(rank: int, n: int, tree: int) -> int | None:
    """NCCL's tree 0 has root 0; tree 1 is its mirror image (n even) or its shift by one (n odd)."""
    if tree == 1:
        odd = n % 2
        parent = _parent((rank - 1) % n if odd else n - 1 - rank, n, 0)
        return None if parent is None else (parent + 1) % n if odd else n - 1 - parent
    if rank == 0:
        return None
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < n else rank ^ bit


def _depths(parents: list[int | None]) -> list[int]:
    def depth(rank: int) -> int:
        parent = parents[rank]
        return 0 if parent is None else 1 + depth(parent)

    return [depth(rank) for rank in range(len(parents))]


def _heights(parents: list[int | None]) -> list[int]:
    depths = _depths(parents)
    heights = [0] * len(parents)
    for rank in sorted(range(len(parents)), key=lambda r: -depths[r]):
        parent = parents[rank]
        if parent is not None:
            heights[parent] = max(heights[parent], heights[rank] + 1)
    return heights


DOUBLE_BINARY_TREE = Algorithm("double_binary_tree", double_tree_work, double_tree_build, double_tree_chunks)


# -- Pipelines from the root: down a chain, or over a grid along a dimension-ordered spanning tree ---


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


def spanning_chunks(kind: CollectiveKind, level: Level, size: Size) -> Size:
    return pipeline_chunks(level, sum(axis.farthest for axis in axes_of(level)), size)


def spanning_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(depth-1+k)(a + mb/k), depth = sum of (d-1), or floor(d/2) on wrapped axes (Chan et al. 2007).

    Axis i is in use until the tree's first i+1 axes are done, so the last rounds see only the last axes.
    """
    axes = axes_of(level)
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
    edges = list(_grow(axes_of(level), 0, 1, 0))
    return from_root(kind, _pipelined(edges, level.size, chunks, "spanning_tree"))


def _grow(axes: tuple[Axis, ...], rank: int, unit: int, depth: int) -> Iterator[tuple[int, int, int]]:
    """Edges of the tree below ``rank``, which spreads along ``axes``; ``unit`` is the stride of ranks on the first."""
    if not axes:
        return
    axis, *later = axes
    yield from _grow(tuple(later), rank, unit * axis.size, depth)
    for direction, length in ((1, axis.farthest), (-1, axis.size - 1 - axis.farthest)):
        for step in range(length):
            here, there = (direction * step) % axis.size, (direction * (step + 1)) % axis.size
            yield rank + here * unit, rank + there * unit, depth + step
            yield from _grow(tuple(later), rank + there * unit, unit * axis.size, depth + step + 1)


SPANNING_TREE = Algorithm("spanning_tree", spanning_work, spanning_build, spanning_chunks)


# -- Broadcast as scatter + all-gather (van de Geijn); reduce, backwards, as reduce-scatter + gather


def _halves(level: Level) -> tuple[Algorithm, Algorithm]:
    """How to scatter and how to gather on this shape (Thakur et al. 2005; Chan et al. 2007)."""
    if level.shape.family == "fully_connected":
        return DIRECT, DIRECT
    return (CHAIN if level.shape.family == "ring" else BINOMIAL), RING


def scatter_gather_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    scatter, gather = _halves(level)
    outward = scatter.work(CollectiveKind.SCATTER, level, size)
    return rooted(kind, outward + gather.work(CollectiveKind.ALL_GATHER, level, size))


def scatter_gather_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    scatter, gather = _halves(level)
    assert scatter.build is not None and gather.build is not None
    first = scatter.build(CollectiveKind.SCATTER, level, 1)
    second = gather.build(CollectiveKind.ALL_GATHER, level, 1)
    if kind is CollectiveKind.REDUCE:
        first, second = reverse(second), reverse(first)
    return replace(compose(kind, first, second), algorithm="scatter_all_gather")


SCATTER_ALL_GATHER = Algorithm("scatter_all_gather", scatter_gather_work, scatter_gather_build)
