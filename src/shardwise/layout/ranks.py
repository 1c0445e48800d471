"""Where every rank is: its coordinate in each dimension, and its node.

The first dimension of a strategy's order is the innermost: its neighbours are neighbouring ranks. Ranks of a node are
consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.spec.strategy import Strategy


def stride(strategy: Strategy, dimension: str) -> int:
    """Distance in ranks between neighbours of a dimension."""
    distance = 1
    for name in strategy.order:
        if name == dimension:
            break
        distance *= strategy.degree(name)
    return distance


def coordinate(strategy: Strategy, dimension: str, rank: int) -> int:
    return rank // stride(strategy, dimension) % strategy.degree(dimension)


def coordinates(strategy: Strategy, rank: int) -> dict[str, int]:
    """The coordinate of a rank in every dimension, innermost first."""
    return {name: coordinate(strategy, name, rank) for name in strategy.order}


def rank_at(strategy: Strategy, coordinates: Mapping[str, int]) -> int:
    """The rank at these coordinates; those that are not named are 0."""
    return sum(place * stride(strategy, name) for name, place in coordinates.items())


def node_of(rank: int, node_devices: int) -> int:
    return rank // node_devices


def local_rank(rank: int, node_devices: int) -> int:
    """The number of a rank on its own node."""
    return rank % node_devices
