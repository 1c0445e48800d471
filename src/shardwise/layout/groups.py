"""Where every rank is, and the groups of ranks over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy

# -- Where every rank is: its coordinate in each dimension, and its node
# The first dimension of a strategy's order is the innermost: its neighbours are neighbouring ranks. Ranks of a node
# are consecutive.


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


# -- Groups of ranks: as lists of ranks, and as strided runs, which decide a price

Division = tuple[tuple[int, ...], ...]  # all ranks, each in one group
STAGE = ("tp", "cp", "dp")  # the dimensions over which the ranks of one pipeline stage spread
_REMEDY = "choose degrees that divide each other"


class GroupShape(NamedTuple):
    """``degree`` of the ranks along ``dimensions``, innermost first, at strides of ``skip``."""

    dimensions: tuple[str, ...]
    skip: int
    degree: int


def along(strategy: Strategy, *dimensions: str) -> GroupShape:
    """All ranks along some dimensions."""
    return GroupShape(dimensions, 1, math.prod(map(strategy.degree, dimensions)))


def expert_tensor_shape(strategy: Strategy) -> GroupShape:
    """The ranks that split one expert's matrices: innermost of a stage."""
    return GroupShape(STAGE, 1, strategy.expert_tensor_parallel)


def expert_shape(strategy: Strategy) -> GroupShape:
    """The ranks that one layer's experts are spread over."""
    return GroupShape(STAGE, strategy.expert_tensor_parallel, strategy.ep)


def expert_data_shape(strategy: Strategy) -> GroupShape:
    """The ranks that hold the same experts: outermost of a stage."""
    return GroupShape(STAGE, strategy.expert_tensor_parallel * strategy.ep, strategy.expert_data_parallel)


def division(strategy: Strategy, shape: GroupShape) -> Division:
    """The groups of a shape: every rank of the world in one of them."""
    members = _members(group_runs(strategy, shape.dimensions))
    firsts = _members(group_runs(strategy, [name for name in strategy.order if name not in shape.dimensions]))
    block = shape.skip * shape.degree
    if len(members) % block:
        problem = f"{shape.degree} cuts across the {len(members)} ranks of {'·'.join(shape.dimensions)}"
        raise SpecError("strategy", problem, _REMEDY)
    return tuple(
        sorted(
            tuple(first + member for member in members[start + place : start + block : shape.skip])
            for first in firsts
            for start in range(0, len(members), block)
            for place in range(shape.skip)
        )
    )


class RankRun(NamedTuple):
    """``degree`` ranks, ``stride`` apart."""

    stride: int
    degree: int


def group_runs(strategy: Strategy, dimensions: Sequence[str]) -> tuple[RankRun, ...]:
    """The ranks of one group over several dimensions, as runs, innermost first and merged where adjacent."""
    ordered = [name for name in strategy.order if name in dimensions]
    return _merged([RankRun(stride(strategy, name), strategy.degree(name)) for name in ordered])


def _merged(runs: Sequence[RankRun]) -> tuple[RankRun, ...]:
    merged: list[RankRun] = []
    for run in runs:
        if run.degree == 1:
            continue
        if merged and merged[-1].stride * merged[-1].degree == run.stride:
            merged[-1] = RankRun(merged[-1].stride, merged[-1].degree * run.degree)
        else:
            merged.append(run)
    return tuple(merged)


def part_of(runs: Sequence[RankRun], skip: int, degree: int, field: str) -> tuple[RankRun, ...]:
    """``degree`` members of a group, innermost first, at strides of ``skip``."""
    taken: list[RankRun] = []
    for run in runs:
        passed = min(skip, run.degree)
        here = min(degree, run.degree // passed)
        if run.degree % passed or skip % passed or (run.degree // passed) % here or degree % here:
            raise SpecError(field, f"{degree} cuts across the other dimensions", _REMEDY)
        if here > 1:
            taken.append(RankRun(run.stride * passed, here))
        skip //= passed
        degree //= here
    return _merged(taken)


def shape_runs(strategy: Strategy, shape: GroupShape, field: str) -> tuple[RankRun, ...]:
    """One group of a shape as runs; ``field`` is the one to change where the shape does not divide."""
    return part_of(group_runs(strategy, shape.dimensions), shape.skip, shape.degree, field)


def expert_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    return shape_runs(strategy, expert_shape(strategy), "strategy.ep")


def expert_data_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    return shape_runs(strategy, expert_data_shape(strategy), "strategy.ep")


def expert_tensor_runs(strategy: Strategy) -> tuple[RankRun, ...]:
    return shape_runs(strategy, expert_tensor_shape(strategy), "strategy.expert_tp")


def division_of(world: int, runs: Sequence[RankRun]) -> Division:
    """All groups like the one of ``runs`` among the ranks of a world."""
    members = _members(runs)
    firsts = [rank for rank in range(world) if all(rank // run.stride % run.degree == 0 for run in runs)]
    return tuple(tuple(first + member for member in members) for first in firsts)


def _members(runs: Sequence[RankRun]) -> list[int]:
    """The ranks of runs, counted from the first of them, in ascending order."""
    members = [0]
    for run in runs:
        members = [far + near for far in range(0, run.stride * run.degree, run.stride) for near in members]
    return members


def expected_destinations(experts: int, places: int, chosen: int, limit: int | None = None) -> float:
    """Distinct places among N that hold the k experts of a token: N(1 − C(E − E/N, k) / C(E, k)).

    The E experts are spread evenly over the places, and every set of k is equally likely. ``limit`` is the most places
    that node-limited routing allows.
    """
    elsewhere = experts - experts / places
    avoided = math.prod(max(0.0, elsewhere - drawn) / (experts - drawn) for drawn in range(chosen))
    expected = places * (1 - avoided)
    return expected if limit is None else min(expected, float(limit))
