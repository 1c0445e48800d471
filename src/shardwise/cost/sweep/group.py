"""Strategies that share their degrees, as the axes of a table.

Rows differ in sequence parallelism, context method, microbatch, schedule and recompute; columns in ZeRO and its shard
group. Every column may offload in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.layout.groups import RankRun, expert_runs, expert_tensor_runs, group_runs
from shardwise.layout.sharding import Sharding, sharding_of
from shardwise.layout.stages import RankContents
from shardwise.spec.strategy import Offload, Strategy


# The fields of a choice are those of a `Strategy`.
@dataclass(frozen=True)
class LayerChoice:
    sequence_parallel: bool
    context_method: str
    microbatch: int


@dataclass(frozen=True)
class ScheduleChoice:
    schedule: str
    interleave: int
    stage_layers: str | tuple[int, ...]


@dataclass(frozen=True)
class RecomputeChoice:
    recompute: str
    recompute_layers: int | None = None


@dataclass(frozen=True)
class ShardChoice:
    """A column: ZeRO and its shard group; None is all data-parallel ranks."""

    zero: int
    shard_group: int | None = None
    keep_parameters: bool = False
    accumulate: str = "sharded"

    def of(self, base: Strategy) -> Sharding:
        """The sharding of a strategy with this choice and the degrees of ``base``."""
        return sharding_of(base.unchecked(**vars(self)))


@dataclass(frozen=True)
class Group:
    """Strategies that share their degrees: every combination of the choices. All schedules of a group put the same
    layers on the ranks."""

    base: Strategy
    """The degrees, the rank order, and the overlap and dispatch of all strategies here. Under autocast also a stage of
    ZeRO: then all strategies shard weights, or none does (`Job.autocasts`)."""
    layers: tuple[LayerChoice, ...]
    schedules: tuple[ScheduleChoice, ...]
    recomputes: tuple[RecomputeChoice, ...]
    shards: tuple[ShardChoice, ...]
    offloads: tuple[Offload, ...]
    ranks: tuple[RankContents, ...]
    """One pipeline rank of each kind."""
    members: tuple[tuple[int, ...], ...]
    """The pipeline ranks of each kind."""
    sequences: tuple[tuple[int, ...], ...]
    """Of a step: layer × schedule choice; 0 if the batch does not divide."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many pipeline ranks are of each kind."""
        return tuple(len(ranks) for ranks in self.members)

    @cached_property
    def row_cells(self) -> int:
        """Kinds of rank × rows."""
        return len(self.ranks) * len(self.layers) * len(self.schedules) * len(self.recomputes)

    @cached_property
    def places(self) -> dict[str, tuple[RankRun, ...]]:
        """Which ranks the groups of each dimension inside a pipeline hold."""
        dense = {name: group_runs(self.base, (name,)) for name in ("tp", "cp", "pp")}
        return {**dense, "ep": expert_runs(self.base), "expert_tp": expert_tensor_runs(self.base)}

    def strategy(self, row: dict[str, Any], column: ShardChoice, offload: Offload) -> Strategy:
        return replace(self.base, **row, **vars(column), offload=offload)


def groups_alike(groups: Sequence[Group], cells: int) -> Iterator[list[int]]:
    """Numbers of groups whose rows can be priced together: the same ranks, schedules and kinds of traffic.

    Unless it is a single group, together they have at most about ``cells`` (kinds of rank × rows).
    """
    alike: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        base = group.base
        dimensions = (base.tp > 1, base.cp > 1, base.ep > 1, base.overlap.ep)
        key = (group.members, group.ranks, group.schedules, group.recomputes, dimensions)
        if sum(groups[other].row_cells for other in alike.get(key, ())) >= cells:
            yield alike.pop(key)
        alike.setdefault(key, []).append(number)
    yield from alike.values()
