"""Where the ranks of a dimension sit: a cluster as a network, and the part of it each group spans."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.collectives import Level, Topology, place
from shardwise.collectives.shapes import Axis, FullyConnected, Grid, Shape, Switch, Tree
from shardwise.collectives.topology import InNetwork
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel
from shardwise.spec.strategy import Strategy


@functools.lru_cache(maxsize=64)
def network(cluster: Cluster) -> Topology:
    """The whole cluster's network."""
    levels = tuple(_level(level) for level in cluster.levels)
    return Topology(levels=levels, pipelined_levels=cluster.pipelined_levels, library=cluster.library)


def _level(level: NetworkLevel) -> Level:
    in_network = None
    if level.in_network is not None:
        described = level.in_network
        in_network = InNetwork(described.kind, described.efficiency, described.ramp, described.startup)
    return Level(
        shape=_shape(level),
        bandwidth=level.bandwidth_per_direction,
        latency=level.latency_per_step,
        ports=level.ports,
        startup=level.startup,
        efficiency=level.reached_share,
        ramp_bytes=level.ramp,
        in_network=in_network,
        name=level.name,
    )


def _shape(level: NetworkLevel) -> Shape:
    if level.topology == "switch":
        return Switch(level.width)
    if level.topology == "tree":
        return Tree(level.width)
    if level.topology == "fully-connected":
        return FullyConnected(level.width)
    axes = level.shape or (level.width,)
    return Grid(tuple(Axis(size, level.wraps(size)) for size in axes))


class Run(NamedTuple):
    """``degree`` ranks at equal distances of ``stride``."""

    stride: int
    degree: int


def group_runs(strategy: Strategy, dimensions: Sequence[str]) -> tuple[Run, ...]:
    """The ranks of one group over several dimensions, as runs, innermost first and merged where adjacent."""
    ordered = [name for name in strategy.order if name in dimensions]
    return _merged([Run(strategy.stride(name), strategy.degree(name)) for name in ordered])


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for run in runs:
        if run.degree == 1:
            continue
        if merged and merged[-1].stride * merged[-1].degree == run.stride:
            merged[-1] = Run(merged[-1].stride, merged[-1].degree * run.degree)
        else:
            merged.append(run)
    return tuple(merged)


def part_of(runs: Sequence[Run], skip: int, degree: int, field: str) -> tuple[Run, ...]:
    """``degree`` members of a group, innermost first, after a factor ``skip`` that others take."""
    taken: list[Run] = []
    for run in runs:
        passed = min(skip, run.degree)
        here = min(degree, run.degree // passed)
        if run.degree % passed or skip % passed or (run.degree // passed) % here or degree % here:
            raise SpecError(
                field, f"{degree} cuts across the other dimensions", "choose degrees that divide each other"
            )
        if here > 1:
            taken.append(Run(run.stride * passed, here))
        skip //= passed
        degree //= here
    return _merged(taken)


def expert_runs(strategy: Strategy) -> tuple[Run, ...]:
    """The ranks that one layer's experts are spread over: ``expert_tp`` skipped, ``ep`` taken."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    return part_of(ranks, strategy.expert_tensor_parallel, strategy.ep, "strategy.ep")


def expert_data_runs(strategy: Strategy) -> tuple[Run, ...]:
    """The ranks that hold the same experts."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    inner = strategy.expert_tensor_parallel * strategy.ep
    return part_of(ranks, inner, strategy.expert_data_parallel, "strategy.ep")


def expert_tensor_runs(strategy: Strategy) -> tuple[Run, ...]:
    """The ranks that split one expert's matrices."""
    ranks = group_runs(strategy, ("tp", "cp", "dp"))
    return part_of(ranks, 1, strategy.expert_tensor_parallel, "strategy.expert_tp")


@functools.lru_cache(maxsize=4096)
def spanned(cluster: Cluster, runs: tuple[Run, ...], field: str) -> Topology | None:
    """The network one group sees while all groups like it communicate at once; None for a group of one."""
    levels: list[Level] = []
    for run in runs:
        try:
            levels += place(network(cluster), run.stride, run.degree).levels
        except SpecError as error:
            raise SpecError(field, error.problem, error.remedy) from None
    if not levels:
        return None
    return Topology(levels=tuple(levels), pipelined_levels=cluster.pipelined_levels, library=cluster.library)


def exchanging(topology: Topology, cluster: Cluster) -> Topology:
    """The same network as an exchange of expert tokens or heads sees it: its own share of the innermost level.

    Many small pieces to every peer reach less than a ring does; the share is the device's (see `Efficiency`).
    """
    share = cluster.device.efficiency.exchange
    inner = cluster.levels[0].name
    levels = tuple(
        replace(level, efficiency=share, ramp_bytes=0.0) if level.name == inner else level for level in topology.levels
    )
    return replace(topology, levels=levels)


def level_names(topology: Topology) -> str:
    """The network levels of a group, for a table: "nvlink 8 · infiniband 4"."""
    return " · ".join(f"{level.name} {_width(level)}" for level in topology.levels)


def _width(level: Level) -> str:
    if isinstance(level.shape, Grid) and len(level.shape.axes) > 1:
        return "x".join(str(axis.size) for axis in level.shape.axes)
    return str(level.size)
