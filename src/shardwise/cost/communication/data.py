"""Data parallelism: gradient reduction, and what ZeRO gathers.

ZeRO-1 and 2 reduce-scatter gradients and all-gather updated parameters: the bytes of one all-reduce. ZeRO-3
gathers parameters in the forward and again in the backward pass: 1.5 times that, and the gathers repeat for
every microbatch unless the gathered parameters are kept (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from shardwise.collectives import CollectiveKind
from shardwise.collectives.arrays import minimum
from shardwise.cost.network import Run, expert_data_runs, group_runs, part_of, spanned
from shardwise.cost.overlap import Pass
from shardwise.cost.stages import RankContents
from shardwise.cost.states import Sharding, divided_over, expert_shards, sharding_of
from shardwise.cost.traffic import Traffic, priced
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class SharedRanks:
    """The ranks that hold the same parameters: those that share one copy, and those that hold a copy each."""

    shards: int
    sharded: tuple[Run, ...]
    replicas: tuple[Run, ...]


def dense_ranks(strategy: Strategy, shards: int) -> SharedRanks:
    """Of everything but the routed experts: cp·dp ranks, ``shards`` of which share one copy."""
    return _shared(group_runs(strategy, ("cp", "dp")), shards)


def expert_ranks(strategy: Strategy, shards: int) -> SharedRanks:
    """Of the routed experts: expert data parallelism, cut like the ``shards`` of the dense parts."""
    return _shared(expert_data_runs(strategy), round(expert_shards(strategy, shards)))


@lru_cache(maxsize=65536)  # asked for again for every schedule of a layout
def _shared(runs: tuple[Run, ...], shards: int) -> SharedRanks:
    members = math.prod(run.degree for run in runs)
    inner = part_of(runs, 1, shards, "strategy.shard_group")
    return SharedRanks(shards, inner, part_of(runs, shards, members // shards, "strategy.shard_group"))


def data_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives over the ranks that hold the same parameters: cp·dp, and expert data parallelism."""
    strategy, shards = job.strategy, divided_over(job.strategy)
    dense_units, expert_units = communication_units(contents)
    dense, layers, experts = contents.dense, contents.layer_matrices, contents.experts
    traffics = _group_traffic(job, "", dense, layers, dense_units, dense_ranks(strategy, shards))
    if experts:
        traffics += _group_traffic(job, "expert ", experts, experts, expert_units, expert_ranks(strategy, shards))
    return traffics


def communication_units(contents: RankContents) -> tuple[int, int]:
    """Pieces of the dense parameters and of the experts that are reduced or gathered one after the other: layers."""
    return max(1, contents.layers), max(1, contents.moe_layers)


class Wire(NamedTuple):
    """Bytes per element of reduced gradients and of gathered parameters, and whether a pass can hide the gather.

    ``ends_once``: embedding and head are gathered once for both passes. ``sums_once``: copies of gradient shards are
    summed once a step, however often they are made.
    """

    gradient: float
    weight: float
    gather_hides: bool
    ends_once: bool = False
    sums_once: bool = False


def wire_bytes(job: Job, pp: int) -> Wire:
    """What the stack sends; parameters that it gathers in the optimizer's step are waited for."""
    recipe, stack = job.training.recipe, job.stack
    gradient = min(recipe.gradient, 2.0) if stack.gradient_reduce == "bf16" else recipe.gradient
    narrow = stack.parameter_gather == "fp8" and recipe.compute in ("fp8", "fp4")
    fsdp = stack.sharded_parameters == "fp32 shards"
    return Wire(gradient, 1.0 if narrow else recipe.weight, not stack.per_parameter_shards, fsdp, fsdp and pp == 1)


@dataclass(frozen=True)
class DataLine:
    """One collective over the shards or the replicas of a group of parameters, once per unit.

    ``times`` is how often a step goes over all units.
    """

    what: str
    kind: CollectiveKind
    over: Literal["shards", "replicas"]
    unit_bytes: Any
    times: Any
    window: Pass
    window_share: Any
    last_only: bool


def data_lines(
    sharding: Sharding,
    unit_parameters: Any,
    unit_layer: Any,
    shards: Any,
    wire: Wire,
    microbatches: Any,
    last: Any,
) -> list[DataLine]:
    """What one group of parameters sends; ``last`` is the share of a pass in which gradients are complete.

    ``unit_layer`` are those of a unit's parameters that are in layers. Numbers of one strategy, or columns of a table
    of them.
    """
    gradient, weight = wire.gradient, wire.weight
    reductions, share = (microbatches, 1.0) if sharding.gradients_sharded else (1, last)
    gathers, gather_share = (1, last if wire.gather_hides else 0.0) if sharding.gathers_once else (microbatches, 1.0)
    whole, part = unit_parameters * gradient, unit_parameters * gradient / shards
    gathered = unit_parameters * weight
    gather, scatter, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    late = not sharding.gradients_sharded
    sums, sum_share, sums_late = (1, last, True) if wire.sums_once else (reductions, share, late)
    lines = [
        DataLine("gradients, backward", scatter, "shards", whole, reductions, "backward", share, late),
        DataLine(
            "parameters, forward", gather, "shards", gathered, gathers, "forward", gather_share, sharding.gathers_once
        ),
        DataLine("gradient shards, backward", reduce, "replicas", part, sums, "backward", sum_share, sums_late),
    ]
    if not sharding.gathers_once:
        once_more = unit_layer * weight if wire.ends_once else gathered
        again = DataLine("parameters, backward", gather, "shards", once_more, microbatches, "backward", 1.0, False)
        lines.insert(0, again)
    return lines


def last_share(pp: int, schedule: str, microbatches: Any) -> Any:
    """Share of a pass in which gradients are complete: the last microbatch; of every chunk, when interleaved."""
    return minimum(1.0, (pp if schedule == "interleaved" else 1) / microbatches)


def _group_traffic(
    job: Job, name: str, parameters: float, in_layers: float, units: int, ranks: SharedRanks
) -> list[Traffic]:
    strategy, m = job.strategy, job.microbatches
    last = last_share(strategy.pp, strategy.schedule, m)
    over = {
        "shards": spanned(job.cluster, ranks.sharded, "strategy.dp"),
        "replicas": spanned(job.cluster, ranks.replicas, "strategy.dp"),
    }
    traffics = []
    each, layer, wire = parameters / units, in_layers / units, wire_bytes(job, strategy.pp)
    for line in data_lines(sharding_of(strategy), each, layer, ranks.shards, wire, m, last):
        topology = over[line.over]
        if topology is None:
            continue
        what = "gradients, backward" if line.over == "replicas" and ranks.shards == 1 else line.what
        traffics.append(
            priced(
                "dp",
                name + what,
                line.kind,
                line.unit_bytes,
                line.times * units,
                topology,
                strategy.collective,
                window=line.window if strategy.overlap.dp else "none",
                window_share=line.window_share,
                last_only=line.last_only,
                unhideable=1 / units,
            )
        )
    return traffics
