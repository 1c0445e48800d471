"""Reduction and multicast inside the switch: NVLink SHARP (nvls) and InfiniBand SHARP. Cost only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, rooted
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


def _all_reduce(n: int, moved: Size, steps: int = 2) -> Work:
    return Work(2, moved, steps, moved, moved, n * moved, in_network=True)


def _one_way(kind: CollectiveKind, n: int, size: Size) -> Work:
    """Broadcast and reduce: a + mb, one multicast or one reduction in the switch."""
    return rooted(kind, Work(1, size, 1, size, size, (n - 1) * size, in_network=True))


def nvls_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """2a + m(1+1/n)b: the switch reads all of a device's data, and the device writes back its 1/n of the
    sum, which is multicast (NCCL src/graph/tuning.cc, NVLS)."""
    n = level.size
    return _all_reduce(n, size * (1 + 1 / n)) if kind is CollectiveKind.ALL_REDUCE else _one_way(kind, n, size)


def sharp_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    """2a + mb: up the tree of switches and down again (Bloch et al. 2017)."""
    n = level.size
    return _all_reduce(n, size) if kind is CollectiveKind.ALL_REDUCE else _one_way(kind, n, size)


NVLS = Algorithm("nvls", nvls_work)
SHARP = Algorithm("sharp", sharp_work)
