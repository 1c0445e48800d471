"""A cluster as a network, and the part of it that each group of ranks spans."""

from __future__ import annotations

import functools
from dataclasses import replace

from shardwise.collectives import Level, Topology, place
from shardwise.collectives.shapes import Axis, Grid, Shape, shape_of
from shardwise.collectives.topology import InNetwork
from shardwise.layout.groups import RankRun, division_of
from shardwise.layout.wired import Neighbours, as_wired
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel


@functools.lru_cache(maxsize=64)
def network(cluster: Cluster) -> Topology:
    levels = tuple(_level(level) for level in cluster.levels)
    return Topology(levels=levels, pipelined_levels=cluster.pipelined_levels, library=cluster.library)


def _level(level: NetworkLevel) -> Level:
    helps = level.in_network
    in_network = None if helps is None else InNetwork(helps.kind, helps.efficiency, helps.ramp, helps.startup)
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
    if level.topology in ("switch", "tree", "fully-connected"):
        return shape_of(level.topology.replace("-", "_"), level.width)
    axes = level.shape or (level.width,)
    return Grid(tuple(Axis(size, level.wraps(size)) for size in axes))


@functools.lru_cache(maxsize=4096)
def spanned(
    cluster: Cluster, runs: tuple[RankRun, ...], field: str, neighbours: Neighbours = "ring"
) -> Topology | None:
    """The network of one group while all groups like it communicate at once; None for a group of one.

    Where the cluster's nodes are known one by one, ``neighbours`` says which members of a group send to each other: the
    slowest link between two of them is the pace of all.
    """
    try:
        parts = [place(network(cluster), run.stride, run.degree) for run in runs]
    except SpecError as error:
        raise SpecError(field, error.problem, error.remedy) from None
    levels = [level for part in parts for level in part.levels]
    if not levels:
        return None
    straddles = any(part.straddles for part in parts)
    if straddles:  # a run that reaches out may come before one that has a level inside
        names = [level.name for level in cluster.levels]
        levels.sort(key=lambda level: names.index(level.name))
    found = replace(network(cluster), levels=tuple(levels), straddles=straddles)
    return found if cluster.wiring is None else as_wired(cluster, division_of(cluster.devices, runs), found, neighbours)


def level_names(topology: Topology) -> str:
    """The network levels of a group, for a table: "nvlink 8 · infiniband 4"; about, where its parts are unequal."""
    names = " · ".join(f"{level.name} {_width(level)}" for level in topology.levels)
    return f"~ {names}" if topology.straddles else names


def _width(level: Level) -> str:
    if isinstance(level.shape, Grid) and len(level.shape.axes) > 1:
        return "x".join(str(axis.size) for axis in level.shape.axes)
    return str(level.size)
