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
    if strategy.has_unlike_stages:
        stage, first = stage_of(strategy, rank)
        return stage if dimension == "pp" else coordinate(strategy.of_stage(stage), dimension, rank - first)
    return rank // stride(strategy, dimension) % strategy.degree(dimension)


def coordinates(strategy: Strategy, rank: int) -> dict[str, int]:
    """The coordinate of a rank in every dimension, innermost first."""
    return {name: coordinate(strategy, name, rank) for name in strategy.order}


def rank_at(strategy: Strategy, coordinates: Mapping[str, int]) -> int:
    """The rank at these coordinates; those that are not named are 0."""
    if strategy.has_unlike_stages:
        stage = coordinates.get("pp", 0)
        inside = {name: place for name, place in coordinates.items() if name != "pp"}
        return first_rank(strategy, stage) + rank_at(strategy.of_stage(stage), inside)
    return sum(place * stride(strategy, name) for name, place in coordinates.items())


def first_rank(strategy: Strategy, stage: int) -> int:
    """The first rank of a pipeline rank, where their ranks stand side by side (pp is the outermost dimension)."""
    before = map(strategy.of_stage, range(stage))
    return sum(stage.tp * stage.cp * stage.data_parallel for stage in before)


def stage_of(strategy: Strategy, rank: int) -> tuple[int, int]:
    """The pipeline rank of a rank, and the first of that one's ranks; pp is the outermost dimension."""
    for stage in reversed(range(strategy.pp)):
        if (first := first_rank(strategy, stage)) <= rank:
            return stage, first
    raise ValueError(f"rank {rank} of {strategy.world}")


def node_of(rank: int, node_devices: int) -> int:
    return rank // node_devices


def local_rank(rank: int, node_devices: int) -> int:
    """The number of a rank on its own node."""
    return rank % node_devices
