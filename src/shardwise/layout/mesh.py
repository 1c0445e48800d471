"""The mesh of a strategy: every named group of ranks that communicates, and where each rank is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout.groups import (
    STAGE,
    Division,
    GroupShape,
    along,
    coordinate,
    division,
    expert_data_shape,
    expert_shape,
    expert_tensor_shape,
    first_rank,
    local_rank,
    node_of,
)
from shardwise.layout.sharding import divided_over, expert_shards, kv_copies
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy


def mesh_shapes(strategy: Strategy, key_value_heads: int | None = None) -> dict[str, GroupShape]:
    """The shape of every named group:

    - ``tp``, ``cp``, ``dp``, ``pp``: the dimensions of the strategy;
    - ``sequence``: cp·tp, ranks that hold parts of the same sequences;
    - ``stage``: dp·cp·tp, all ranks of one pipeline stage;
    - ``kv_copies``: tensor-parallel ranks that hold the same key-value heads, where there are fewer heads than ranks;
    - ``ep``, ``expert_tp``: ranks that hold different experts, and parts of the same expert;
    - ``replicate``, ``shard``: cp·dp ranks with the same dense parameters, cut into shard groups by ZeRO;
    - ``expert_replicate``, ``expert_shard``: the same for experts;
    - ``worker``: all ranks of one replica, where replicas do not synchronise in every step.
    """
    shards = divided_over(strategy)
    return {
        **{name: along(strategy, name) for name in reversed(strategy.order)},
        "stage": along(strategy, *STAGE),
        "sequence": along(strategy, "tp", "cp"),
        "kv_copies": GroupShape(("tp",), 1, kv_copies(strategy.tp, key_value_heads)),
        **_sharded("", along(strategy, "cp", "dp"), shards),
        **_sharded("expert_", expert_data_shape(strategy), expert_shards(strategy, shards)),
        "ep": expert_shape(strategy),
        "expert_tp": expert_tensor_shape(strategy),
        **({} if strategy.synchronise.every_step else {"worker": along(strategy, "tp", "cp", "pp")}),
    }


def _sharded(prefix: str, copies: GroupShape, shards: int) -> dict[str, GroupShape]:
    """Ranks that hold the same parameters: copies of the shards outside, the ``shards`` of one copy inside."""
    dimensions, skip, degree = copies
    return {
        f"{prefix}replicate": GroupShape(dimensions, skip * shards, degree // shards),
        f"{prefix}shard": GroupShape(dimensions, skip, shards),
    }


def mesh_divisions(strategy: Strategy, key_value_heads: int | None = None) -> dict[str, Division]:
    """For every name of the mesh the groups into which it divides the ranks of the world.

    Where stages are unlike, groups are inside stages, and ``pp`` is every rank by itself: `layout.boundaries` says
    which ranks exchange messages.
    """
    if strategy.has_unlike_stages:
        return _unlike_divisions(strategy, key_value_heads)
    return {name: division(strategy, shape) for name, shape in mesh_shapes(strategy, key_value_heads).items()}


def _unlike_divisions(strategy: Strategy, key_value_heads: int | None) -> dict[str, Division]:
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for stage in range(strategy.pp):
        first = first_rank(strategy, stage)
        for name, groups in mesh_divisions(strategy.of_stage(stage).unchecked(pp=1), key_value_heads).items():
            by_name.setdefault(name, []).extend(tuple(first + rank for rank in ranks) for ranks in groups)
    return {name: tuple(groups) for name, groups in by_name.items()}


@dataclass(frozen=True)
class RankPlace:
    """One rank: where it sits, its coordinate and its group (numbered) in every dimension."""

    rank: int
    node: int
    local_rank: int
    coordinates: dict[str, int]
    groups: dict[str, int]


def rank_places(job: Job) -> list[RankPlace]:
    """All ranks of the job, in order."""
    strategy, node_devices = job.strategy, job.cluster.node_devices
    known = mesh_divisions(strategy)
    divisions: dict[str, Sequence[tuple[int, ...]]] = {name: known[name] for name in strategy.order}
    if job.model.moe is not None:  # expert groups are numbered stage by stage
        divisions["ep"] = sorted(known["ep"], key=lambda ranks: coordinate(strategy, "pp", ranks[0]))
    positions: list[dict[str, int]] = [{} for _ in range(strategy.world)]
    numbers: list[dict[str, int]] = [{} for _ in range(strategy.world)]
    for name, groups in divisions.items():
        for number, ranks in enumerate(groups):
            for position, rank in enumerate(ranks):
                positions[rank][name], numbers[rank][name] = position, number
    if strategy.has_unlike_stages:  # all pipelines are one
        for rank in range(strategy.world):
            positions[rank]["pp"], numbers[rank]["pp"] = coordinate(strategy, "pp", rank), 0
    return [
        RankPlace(rank, node_of(rank, node_devices), local_rank(rank, node_devices), positions[rank], numbers[rank])
        for rank in range(strategy.world)
    ]
