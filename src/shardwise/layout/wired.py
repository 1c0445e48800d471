"""A group's network with the links that its nodes really have: the slowest that is used sets the pace.

A ring passes all it sends over each of its links, so the slowest link is its bandwidth (Thakur, Rabenseifner, Gropp
2005; derived for unequal links). A node that exchanges with k-1 others sends each of them a part, so a slow link
there counts 1/(k-1). No link is taken to be faster than the cluster's description says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal

from shardwise.collectives import CollectiveKind, Topology
from shardwise.layout.ranks import node_of
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel

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


def node_link(cluster: Cluster, one: int, other: int) -> NodeLink:
    """What is known of two nodes, as the wiring says it: measured, or by their switches."""
    return link_between(cluster, joining_level(cluster, one, other), one, other)


def link_between(cluster: Cluster, planned: NetworkLevel, one: int, other: int) -> NodeLink:
    """The same for two nodes that the plan takes to be joined by the level ``planned``."""
    assert cluster.wiring is not None
    measured, tier = cluster.wiring.link(one, other), cluster.wiring.tier(one, other)
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


def joining_level(cluster: Cluster, one: int, other: int) -> NetworkLevel:
    """The innermost level that joins two nodes, by their numbers."""
    first, last, below = one * cluster.node_devices, other * cluster.node_devices, 1
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
            found = list(combinations(nodes, 2))
        else:
            found = list(pairwise(nodes)) + ([(nodes[-1], nodes[0])] if neighbours == "ring" else [])
        yield from {(min(pair), max(pair)) for pair in found}


def as_wired(cluster: Cluster, groups: Sequence[Sequence[int]], planned: Topology, neighbours: Neighbours) -> Topology:
    """``planned`` with the links of the nodes that the groups' members are on."""
    links = [node_link(cluster, *pair) for pair in set(pairs_used(groups, cluster.node_devices, neighbours))]
    parts = _nodes_of_a_group(groups, cluster.node_devices) - 1 if neighbours == "all" else 1
    levels = []
    for level in planned.levels:
        used = [link for link in links if link.level == level.name]
        if used:
            share = min(1.0, parts * min(link.share for link in used))
            late = max(link.latency for link in used)
            level = replace(level, bandwidth=level.bandwidth * share, latency=max(level.latency, late))
        levels.append(level)
    return replace(planned, levels=tuple(levels))


def _nodes_of_a_group(groups: Sequence[Sequence[int]], node_devices: int) -> int:
    return len({node_of(rank, node_devices) for rank in groups[0]})
