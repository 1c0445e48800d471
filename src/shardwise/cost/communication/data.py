"""Data parallelism: gradient reduction, and what ZeRO gathers.

ZeRO-1 and 2 reduce-scatter gradients and all-gather updated parameters: the bytes of one all-reduce. ZeRO-3
gathers parameters in the forward and again in the backward pass: 1.5 times that, and the gathers repeat for
every microbatch unless the gathered parameters are kept (Rajbhandari et al. 2020, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.network import Run, expert_data_runs, group_runs, part_of, spanned
from shardwise.cost.stages import RankContents
from shardwise.cost.states import expert_shards
from shardwise.cost.traffic import Traffic, Window, priced
from shardwise.spec.job import Job


@dataclass(frozen=True)
class _Group:
    """Parameters with one data-parallel group: the dense ones, or the routed experts."""

    what: str
    parameters: float
    units: int  # pieces that are reduced or gathered one after the other: layers
    sharded_over: Topology | None
    replicated_over: Topology | None
    shards: float


def data_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives over the ranks that hold the same parameters: cp·dp, and expert data parallelism."""
    strategy = job.strategy
    dense = _group(
        job, "", contents.dense, contents.layers, group_runs(strategy, ("cp", "dp")), strategy.sharding_group
    )
    traffics = _group_traffic(job, dense)
    if contents.experts:
        experts = _group(
            job,
            "expert ",
            contents.experts,
            contents.moe_layers,
            expert_data_runs(strategy),
            round(expert_shards(strategy)),
        )
        traffics += _group_traffic(job, experts)
    return traffics


def _group(job: Job, what: str, parameters: float, units: int, runs: tuple[Run, ...], shards: int) -> _Group:
    members = 1
    for run in runs:
        members *= run.degree
    if job.strategy.zero == 0:
        return _Group(
            what, parameters, max(1, _tensors(job, units)), None, spanned(job.cluster, runs, "strategy.dp"), 1
        )
    inner = part_of(runs, 1, shards, "strategy.shard_group")
    outer = part_of(runs, shards, members // shards, "strategy.shard_group")
    return _Group(
        what,
        parameters,
        max(1, _tensors(job, units)),
        spanned(job.cluster, inner, "strategy.dp"),
        spanned(job.cluster, outer, "strategy.dp"),
        shards,
    )


def wire_bytes(job: Job) -> tuple[float, float]:
    """Bytes per element of reduced gradients and of gathered parameters, as the stack sends them."""
    recipe, stack = job.training.recipe, job.stack
    gradient = min(recipe.gradient, 2.0) if stack.gradient_reduce == "bf16" else recipe.gradient
    narrow = stack.parameter_gather == "fp8" and recipe.compute in ("fp8", "fp4")
    return gradient, 1.0 if narrow else recipe.weight


def _tensors(job: Job, layers: int) -> int:
    """Pieces that are sent one after the other: layers, or every tensor by itself where the stack does so."""
    if job.stack.per_parameter_collectives and job.strategy.zero == 1:
        per_layer = len(job.model.attention_matrices) + len(job.model.mlp_matrices(job.model.ffn))
        return layers * per_layer
    return layers


def _group_traffic(job: Job, group: _Group) -> list[Traffic]:
    strategy, m = job.strategy, job.microbatches
    unit = group.parameters / group.units
    gradient, weight = wire_bytes(job)
    reductions = m if strategy.gradients_sharded else 1
    # Gradients are complete only in the last microbatch (of every chunk, when interleaved: the last p microbatches),
    # unless every microbatch is reduced.
    last = min(1.0, (strategy.pp if strategy.schedule == "interleaved" else 1) / m)
    share = 1.0 if strategy.gradients_sharded else last
    traffics = []

    def line(
        what: str,
        kind: CollectiveKind,
        size: float,
        times: float,
        topology: Topology,
        window: Window,
        window_share: float,
    ) -> None:
        shown_window: Window = window if strategy.overlap.dp else "none"
        traffics.append(
            priced(
                "dp",
                group.what + what,
                kind,
                size,
                times * group.units,
                topology,
                strategy.collective,
                window=shown_window,
                window_share=window_share,
                unhideable=1 / group.units,
            )
        )

    if group.sharded_over is not None:
        gathers = 1 if strategy.zero < 3 or strategy.keep_parameters else m
        gather_share = last if gathers == 1 else 1.0
        if strategy.zero == 3 and not strategy.keep_parameters:
            line(
                "parameters, backward",
                CollectiveKind.ALL_GATHER,
                unit * weight,
                m,
                group.sharded_over,
                "backward",
                1.0,
            )
        line(
            "gradients, backward",
            CollectiveKind.REDUCE_SCATTER,
            unit * gradient,
            reductions,
            group.sharded_over,
            "backward",
            share,
        )
        line(
            "parameters, forward",
            CollectiveKind.ALL_GATHER,
            unit * weight,
            gathers,
            group.sharded_over,
            "forward",
            gather_share,
        )
    if group.replicated_over is not None:
        size = unit * gradient / group.shards
        line(
            "gradients, backward" if group.shards == 1 else "gradient shards, backward",
            CollectiveKind.ALL_REDUCE,
            size,
            reductions,
            group.replicated_over,
            "backward",
            share,
        )
    return traffics
