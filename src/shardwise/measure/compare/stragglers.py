"""Ranks that compute more slowly than others, found by the time of a layer on each."""

from __future__ import annotations

import statistics
from collections import defaultdict

from shardwise.measure.compare.measured import Measured
from shardwise.spec.model import Model

SLOW = 1.25  # times as long for a layer as on the usual rank


def rank_slowness(model: Model, found: Measured) -> tuple[float, ...] | None:
    """How many times as long each rank takes for a layer as the usual one; None if no layer was recorded.

    Layers are compared with others of their kind. The usual rank is the median, of two the faster.
    """
    kinds: list[dict[bool, float]] = []
    for rank in found.ranks:
        each: dict[bool, list[float]] = defaultdict(list)
        for layer, seconds in rank.layers.items():
            each[model.is_moe_layer(layer)].append(seconds)
        kinds.append({kind: statistics.fmean(seconds) for kind, seconds in each.items()})
    held = [kinds_of_rank for kinds_of_rank in kinds if kinds_of_rank]
    if not held:
        return None
    usual = {
        kind: statistics.median_low(one[kind] for one in held if kind in one)
        for kind in {kind for one in held for kind in one}
    }
    return tuple(
        statistics.mean(seconds / usual[kind] for kind, seconds in one.items()) if one else 1.0 for one in kinds
    )


def straggler(slowness: tuple[float, ...] | None) -> int | None:
    """The slowest rank, if it is slow."""
    if slowness is None or len(slowness) < 2:
        return None
    slowest = max(range(len(slowness)), key=lambda rank: slowness[rank])
    return slowest if slowness[slowest] >= SLOW else None
