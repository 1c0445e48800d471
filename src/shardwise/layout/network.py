"""A cluster as a network, the part of it that each group of ranks spans, and the links that its nodes really have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal

from shardwise.collectives import CollectiveKind, Level, Topology, place
from shardwise.collectives.shapes import Axis, Grid, Shape, shape_of
from shardwise.collectives.topology import InNetwork
from shardwise.layout.groups import RankRun, division_of, node_of
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel

# -- A group's network with the links that its nodes really have: the slowest that is used sets the pace
# A ring passes all it sends over each of its links, so the slowest link is its bandwidth (Thakur, Rabenseifner, Gropp
# 2005; derived for unequal links). A node that exchanges with k-1 others sends each of them a part, so a slow link
# there counts 1/(k-1). No link is taken to be faster than the cluster's description says.

Neighbours = Literal["ring", "line", "all"]  # each with the next (and the last with the first), or each with each


def neighbours_of(library: str, kind: CollectiveKind) -> Neighbours:
    """Who sends to whom in a collective. gloo's reduce-scatter is the engine's: an exchange, then a sum."""
    direct = kind is CollectiveKind.ALL_TO_ALL or (library == "gloo" and kind is CollectiveKind.REDUCE_SCATTER)
    return "all" if direct else "ring"


@dataclass(frozen=True)
class NodeLink:
    """Between two nodes: ``level`` joins them in the plan; the rest is relative to it, and what it really is.

    ``share`` is of the level's rate; ``latency`` is of one step, in seconds.
    """

    level: str
    share: float
    latency: float


def node_link(cluster: Cluster, node: int, other: int) -> NodeLink:
    """What is known of two nodes, as the wiring says it: measured, or by their switches."""
    return link_between(cluster, joining_level(cluster, node, other), node, other)


def link_between(cluster: Cluster, planned: NetworkLevel, node: int, other: int) -> NodeLink:
    """The same for two nodes that the plan takes to be joined by the level ``planned``."""
    assert cluster.wiring is not None
    measured, tier = cluster.wiring.link(node, other), cluster.wiring.tier(node, other)
    if measured is not None:
        step = planned.trips * measured.latency + planned.overhead
        share = min(1.0, measured.bandwidth / rate_for_each(cluster, planned))
        return NodeLink(planned.name, share, max(planned.latency_per_step, step))
    real = planned if tier is None else _at_tier(cluster, tier)
    share = min(1.0, rate_for_each(cluster, real) / rate_for_each(cluster, planned))
    return NodeLink(planned.name, share, max(planned.latency_per_step, real.latency_per_step))


def rate_for_each(cluster: Cluster, level: NetworkLevel) -> float:
    """Bytes/s of one device in one direction while all devices of its node send."""
    share = 1.0 if level.ports is None else min(1.0, level.ports / cluster.node_devices)
    return level.bandwidth_per_direction * level.reached_share * share


def joining_level(cluster: Cluster, node: int, other: int) -> NetworkLevel:
    """The innermost level that joins two nodes, by their numbers."""
    first, last, below = node * cluster.node_devices, other * cluster.node_devices, 1
    for level in cluster.levels:
        below *= level.width
        if first // below == last // below:
            return level
    return cluster.levels[-1]


def _at_tier(cluster: Cluster, tier: int) -> NetworkLevel:
    """Switches are the levels between nodes, the nearest first; one level may stand for several of them."""
    below, between = 1, []
    for level in cluster.levels:
        below *= level.width
        if below > cluster.node_devices:
            between.append(level)
    return between[min(tier, len(between)) - 1] if between else cluster.levels[-1]


def pairs_used(groups: Iterable[Sequence[int]], node_devices: int, neighbours: Neighbours) -> Iterator[tuple[int, int]]:
    """Every two nodes between which a member of a group sends to another, the lower number first."""
    for ranks in groups:
        nodes = list(dict.fromkeys(node_of(rank, node_devices) for rank in ranks))
        if len(nodes) < 2:
            continue
        if neighbours == "all":
            pairs = list(combinations(nodes, 2))
        else:
            pairs = list(pairwise(nodes)) + ([(nodes[-1], nodes[0])] if neighbours == "ring" else [])
        yield from {(min(pair), max(pair)) for pair in pairs}


def as_wired(cluster: Cluster, groups: Sequence[Sequence[int]], planned: Topology, neighbours: Neighbours) -> Topology:
    """``planned`` with the links of the nodes that the groups' members are on."""
    links = [node_link(cluster, *pair) for pair in set(pairs_used(groups, cluster.node_devices, neighbours))]
    parts = len({node_of(rank, cluster.node_devices) for rank in groups[0]}) - 1 if neighbours == "all" else 1
    levels = []
    for level in planned.levels:
        used = [link for link in links if link.level == level.name]
        if used:
            share = min(1.0, parts * min(link.share for link in used))
            late = max(link.latency for link in used)
            level = replace(level, bandwidth=level.bandwidth * share, latency=max(level.latency, late))
        levels.append(level)
    return replace(planned, levels=tuple(levels))


# -- a cluster as a network, and its parts --------------------------------------------------------


@functools.lru_cache(maxsize=64)
def network(cluster: Cluster) -> Topology:
    levels = tuple(_level(cluster, level, inside=index == 0) for index, level in enumerate(cluster.levels))
    return Topology(levels=levels, pipelined_levels=cluster.pipelined_levels, library=cluster.library)


# A step of NCCL's rings with large messages (protocol Simple), whatever the link: over NVLink, PCIe and a network, and
# how much longer rings through several nodes take (src/graph/tuning.cc: hwLatencies, and "plateau effect of ring" from
# compute capability 8.0). Latencies of links are of small messages, or as long as these.
_STEP_INSIDE, _STEP_OVER_PCIE, _STEP_BETWEEN = 3.4e-6, 5.7e-6, 14e-6
_PLATEAU = 1.4


def _ring_step(cluster: Cluster, level: NetworkLevel, *, inside: bool) -> float:
    if cluster.library != "nccl":
        return 0.0
    within = _STEP_OVER_PCIE if level.link is not None and level.link.kind == "pcie" else _STEP_INSIDE
    return _PLATEAU * (within if inside else _STEP_BETWEEN)


def _level(cluster: Cluster, level: NetworkLevel, *, inside: bool) -> Level:
    helps = level.in_network
    in_network = None if helps is None else InNetwork(helps.kind, helps.efficiency, helps.ramp, helps.startup)
    return Level(
        shape=_shape(level),
        bandwidth=level.bandwidth_per_direction,
        latency=level.latency_per_step,
        ring_step=_ring_step(cluster, level, inside=inside),
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
def _placed(cluster: Cluster, run: RankRun) -> Topology:
    return place(network(cluster), run.stride, run.degree)


@functools.lru_cache(maxsize=4096)
def spanned(
    cluster: Cluster, runs: tuple[RankRun, ...], field: str, neighbours: Neighbours = "ring"
) -> Topology | None:
    """The network of one group while all groups like it communicate at once; None for a group of one.

    Where the cluster's nodes are known one by one, ``neighbours`` says which members of a group send to each other: the
    slowest link between two of them is the pace of all.
    """
    try:
        parts = [_placed(cluster, run) for run in runs]
    except SpecError as error:
        raise SpecError(field, error.problem, error.remedy) from None
    levels = [level for part in parts for level in part.levels]
    if not levels:
        return None
    straddles = any(part.straddles for part in parts)
    if straddles:  # a run that reaches out may come before one that has a level inside
        names = [level.name for level in cluster.levels]
        levels.sort(key=lambda level: names.index(level.name))
    planned = replace(network(cluster), levels=tuple(levels), straddles=straddles)
    if cluster.wiring is None:
        return planned
    return as_wired(cluster, division_of(cluster.devices, runs), planned, neighbours)


def level_names(topology: Topology) -> str:
    """The network levels of a group, for a table: "nvlink 8 · infiniband 4"; about, where its parts are unequal."""
    names = " · ".join(f"{level.name} {_width(level)}" for level in topology.levels)
    return f"~ {names}" if topology.straddles else names


def _width(level: Level) -> str:
    if isinstance(level.shape, Grid) and len(level.shape.axes) > 1:
        return "x".join(str(axis.size) for axis in level.shape.axes)
    return str(level.size)
