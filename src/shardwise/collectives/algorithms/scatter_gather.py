"""Broadcast as scatter + all-gather (van de Geijn); reduce, backwards, as reduce-scatter + gather."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, rooted
from shardwise.collectives.algorithms.binomial import BINOMIAL
from shardwise.collectives.algorithms.chain import CHAIN
from shardwise.collectives.algorithms.direct import DIRECT
from shardwise.collectives.algorithms.ring import RING
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, compose, reverse
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


def _halves(level: Level) -> tuple[Algorithm, Algorithm]:
    """How to scatter and how to gather on this shape (Thakur et al. 2005; Chan et al. 2007)."""
    if level.shape.family == "fully_connected":
        return DIRECT, DIRECT
    return (CHAIN if level.shape.family == "ring" else BINOMIAL), RING


def work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    scatter, gather = _halves(level)
    outward = scatter.work(CollectiveKind.SCATTER, level, size)
    return rooted(kind, outward + gather.work(CollectiveKind.ALL_GATHER, level, size))


def build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    scatter, gather = _halves(level)
    assert scatter.build is not None and gather.build is not None
    first = scatter.build(CollectiveKind.SCATTER, level, 1)
    second = gather.build(CollectiveKind.ALL_GATHER, level, 1)
    if kind is CollectiveKind.BROADCAST:
        both = compose(kind, first, second)
    else:
        both = compose(kind, reverse(second), reverse(first))
    return replace(both, algorithm="scatter_all_gather")


SCATTER_ALL_GATHER = Algorithm("scatter_all_gather", work, build)
