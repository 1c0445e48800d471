"""All-reduce over two binary trees, each with half the data; a leaf of one is inside the other.

Sanders et al. 2009; the trees are those of NCCL's src/graph/trees.cc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, log2_ceil
from shardwise.collectives.arrays import best_chunks
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, schedule_of
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


def double_tree_chunks(kind: CollectiveKind, level: Level, size: Size) -> Size:
    return best_chunks(2 * log2_ceil(level.size) - 1, level.latency, 2 * size / level.rate)


def double_tree_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """(2D-1+k)(a + 2mb/k), D = ceil(log2 n): an upper bound, since only middle rounds fill the ports.

    Then a rank inside one tree sends one half-chunk up and two down, and one up as a leaf of the other.
    """
    n = level.size
    k = double_tree_chunks(kind, level, size)
    rounds = 2 * log2_ceil(n) - 1 + k
    busiest = 2 * size if n > 2 else size
    return Work(rounds, rounds * 2 * size / k, rounds, busiest, busiest, 2 * (n - 1) * size)


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
    if tree == 0:
        return _first_parent(rank, n)
    if n % 2 == 0:
        mirrored = _first_parent(n - 1 - rank, n)
        return None if mirrored is None else n - 1 - mirrored
    shifted = _first_parent((rank - 1) % n, n)
    return None if shifted is None else (shifted + 1) % n


def _first_parent(rank: int, n: int) -> int | None:
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
