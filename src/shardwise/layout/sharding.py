"""What is sharded over whom: the ranks that share one copy of the dense parts or of the experts, and their copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwise.layout.groups import RankRun, expert_data_runs, group_runs, part_of
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.training import Recipe


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


@dataclass(frozen=True)
class Sharding:
    """How data parallelism divides the states: numbers of one strategy, or columns of a table of strategies."""

    zero: Any
    shards: Any  # devices that divide the states of the dense parts
    expert_shards: Any  # devices that divide the states of the experts
    gradients_sharded: bool
    """Gradients are reduced to shards after every microbatch (`reduced_to_shards`); the same for a whole table."""
    gathers_once: bool  # parameters are gathered once a step; the same for a whole table
    keep_parameters: Any
    offload: Any  # shares per kind of state, as in `Offload`
    sums_once: Any = False  # copies of shards are summed after the last microbatch, where the stack does so
    kept_bytes: Any = 0.0  # of each parameter, for less communication (`kept_bytes`)
    moved_bytes: Any = 0.0  # of each parameter, for less communication (`moved_bytes`)

    @property
    def divided(self) -> Any:
        return self.zero > 0

    def stage(self, recipe: Recipe) -> Any:
        """The ZeRO stage by which states are held: on our engine 0 where nothing is divided or moved."""
        moved = self.offload.weights + self.offload.gradients > 0
        return self.zero * ((self.shards > 1) | moved) if recipe.fp32_shards else self.zero

    def reduced_to_shards(self, shards: Any) -> Any:
        """Whether gradients divided over so many devices are reduced after every microbatch.

        Not on a single device, where that would free nothing, unless they leave the device.
        """
        return self.gradients_sharded and (shards > 1) | (self.offload.gradients > 0)


def sharding_of(strategy: Strategy) -> Sharding:
    """How a strategy divides its states."""
    shards = divided_over(strategy)
    return Sharding(
        zero=strategy.zero,
        shards=shards,
        expert_shards=expert_shards(strategy, shards),
        gradients_sharded=strategy.gradients_sharded,
        gathers_once=strategy.zero < 3 or strategy.keep_parameters,
        keep_parameters=strategy.keep_parameters,
        offload=strategy.offload,
        sums_once=sums_once(strategy, shards),
        kept_bytes=kept_bytes(strategy),
        moved_bytes=moved_bytes(strategy),
    )


def stacked(shardings: Sequence[Sharding]) -> Sharding:
    """Several shardings that communicate equally often and offload alike, as columns along a last axis."""
    import numpy as np

    def column(name: str) -> Any:
        return np.stack([getattr(sharding, name) for sharding in shardings], axis=-1)

    names = ("zero", "keep_parameters", "sums_once", "kept_bytes", "moved_bytes")
    shards = {name: 1.0 * column(name) for name in ("shards", "expert_shards")}
    return replace(shardings[0], **{name: column(name) for name in names}, **shards)


def updates_on_device(job: Job, offload: Offload) -> bool:
    """Whether the GPU updates offloaded states: on our engine, where they are in host memory, gradients are not
    offloaded, and weights are all offloaded or none."""
    in_memory = offload.target == "cpu" and not offload.gradients and offload.weights in (0, 1)
    return job.stack.is_own and job.run_device == "cuda" and in_memory


def last_weights_stay(pp: int, sharding: Sharding) -> Any:
    """Whether our engine keeps the offloaded weights of the last layer on the device between its two passes.

    Its backward pass follows at once. Where other ranks have shards of the layer, FSDP frees and gathers it like all
    others.
    """
    alone = (sharding.shards == 1) & (sharding.expert_shards == 1)
    return (sharding.offload.weights > 0) & (pp == 1) & alone


def kept_bytes(strategy: Strategy) -> float:
    """Extra bytes that a device keeps for each of its parameters from one step to the next.

    Error feedback: the rounding errors of a rank's codes, and of the codes of the piece that it sums. DiLoCo: the
    weights of the last synchronisation and the outer momentum. Asynchronous: fp32 sums in flight.
    """
    compression, ranks, synchronise = strategy.compression, strategy.gradient_group, strategy.synchronise
    if not synchronise.every_step and ranks > 1:
        return {"diloco": 8.0, "async": 4.0 * synchronise.staleness}.get(synchronise.method, 0.0)
    if not compression.keeps_errors or ranks == 1:
        return 0.0
    return 4.0 if compression.method == "powersgd" else 4 + 4 / ranks


def moved_bytes(strategy: Strategy) -> float:
    """Bytes read and written in a device's memory for each of its parameters in a step, to compress its gradient.

    It is converted to fp32, read again, and the sum is written (16); the error is read and written (8); codes are
    written, read to be added, written and read again. The matmuls of powersgd read the matrix twice (8); 1-bit Adam
    computes its momentum from the gradient, and a gradient from the sum (24). At a synchronisation of workers, the
    payload is computed from their weights and written back (16), by an outer step that reads and writes two states
    (16); late sums are copied once.
    """
    compression, synchronise = strategy.compression, strategy.synchronise
    if not synchronise.every_step and strategy.gradient_group > 1:
        outer = 32 if synchronise.method == "diloco" else 16
        return 8.0 if synchronise.is_async else outer / synchronise.inner_steps
    if not compression.is_used or strategy.gradient_group == 1:
        return 0.0
    codes = 8.0 if compression.method == "powersgd" else 4 * compression.element_bytes
    momentum = 24 if compression.compresses_momentum else 0
    return 16 + (8 if compression.error_feedback else 0) + momentum + codes
