"""What is sharded over whom: the ranks that share one copy of the dense parts or of the experts, and their copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from shardwise.layout.groups import RankRun, expert_data_runs, group_runs, part_of
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Strategy


def divided_over(strategy: Strategy) -> int:
    """Devices that share one copy of the dense states; 1 without ZeRO."""
    return strategy.sharding_group if strategy.zero else 1


def expert_shards(strategy: Strategy, shards: int) -> int:
    """Devices that share one copy of expert states: expert data parallelism, cut like the ``shards`` of the dense.

    Where that does not divide evenly (ep 2 with groups of 3 among 12 ranks), the next smaller divisor.
    """
    copies = strategy.expert_data_parallel
    most = copies * shards // strategy.gradient_group if shards > 1 else 1
    return max(divisor for divisor in divisors(copies) if divisor <= max(1, most))


def sums_once(strategy: Strategy, shards: int) -> bool:
    """Whether FSDP accumulates gradients inside shard groups and reduces across the groups once, at the end."""
    return 1 < shards < strategy.gradient_group and strategy.pp == 1


def gathers_in_fp8(strategy: Strategy, scaling: str) -> bool:
    """Whether weights are gathered in the FP8 form that they are multiplied in: by ZeRO-3, for every use.

    Not with a scale for each row: then the backward pass multiplies other numbers than the forward pass.
    """
    again = strategy.zero == 3 and not strategy.keep_parameters and divided_over(strategy) > 1
    return again and scaling in ("tensor", "block") and not strategy.offload.weights


def kv_copies(tp: int, key_value_heads: int | None) -> int:
    """Tensor-parallel ranks that hold the same key-value heads, where there are fewer heads than ranks."""
    return tp // min(tp, key_value_heads or tp)


def part_held(rank: int, copies: int) -> int:
    """Which part a rank holds where ``copies`` neighbours hold the same."""
    return rank // copies


@dataclass(frozen=True)
class SharedRanks:
    """The ranks that hold the same parameters: those that share one copy, and those that hold a copy each."""

    shards: int
    sharded: tuple[RankRun, ...]
    replicas: tuple[RankRun, ...]


def dense_ranks(strategy: Strategy, shards: int) -> SharedRanks:
    """Of everything but the routed experts: cp·dp ranks, ``shards`` of which share one copy."""
    return _shared(group_runs(strategy, ("cp", "dp")), shards)


def expert_ranks(strategy: Strategy, shards: int) -> SharedRanks:
    """Of the routed experts: expert data parallelism, cut like the ``shards`` of the dense parts."""
    return _shared(expert_data_runs(strategy), expert_shards(strategy, shards))


@lru_cache(maxsize=65536)  # asked for again for every schedule of a layout
def _shared(runs: tuple[RankRun, ...], shards: int) -> SharedRanks:
    members = math.prod(run.degree for run in runs)
    inner = part_of(runs, 1, shards, "strategy.shard_group")
    return SharedRanks(shards, inner, part_of(runs, shards, members // shards, "strategy.shard_group"))
