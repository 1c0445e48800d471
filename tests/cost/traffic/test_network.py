"""Which network levels the ranks of a dimension span, for several orders, and what sharing them costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cost.builders import LLAMA, MOE, job, switched, traffics
from shardwise.collectives import CollectiveKind
from shardwise.collectives.cost import algorithm_names, collective_cost
from shardwise.collectives.shapes import Grid
from shardwise.cost.traffic.execution import step_traffic
from shardwise.layout.groups import expert_data_runs, expert_runs, group_runs
from shardwise.layout.mesh import rank_places
from shardwise.layout.network import network, spanned
from shardwise.layout.stages import rank_contents
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

ORDERS: dict[tuple[str, ...], dict[str, str]] = {
    # 4 nodes of 8: tp 2, cp 2, dp 4, pp 2, innermost first.
    ("tp", "cp", "dp", "pp"): {"tp": "level 0 2", "cp": "level 0 2", "dp": "level 0 2 · level 1 2", "pp": "level 1 2"},
    ("pp", "tp", "cp", "dp"): {"pp": "level 0 2", "tp": "level 0 2", "cp": "level 0 2", "dp": "level 1 4"},
    ("dp", "pp", "cp", "tp"): {"dp": "level 0 4", "pp": "level 0 2", "cp": "level 1 2", "tp": "level 1 2"},
    ("cp", "dp", "tp", "pp"): {"cp": "level 0 2", "dp": "level 0 4", "tp": "level 1 2", "pp": "level 1 2"},
}


def span(case: Job, *dimensions: str) -> str:
    topology = spanned(case.cluster, group_runs(case.strategy, dimensions), "strategy")
    assert topology is not None
    return " · ".join(f"{level.name} {level.size}" for level in topology.levels)


@pytest.mark.parametrize("order", ORDERS)
def test_levels_of_every_dimension(order: tuple[str, ...]) -> None:
    case = job(LLAMA, switched(8, 4), order=list(order), tp=2, cp=2, dp=4, pp=2)
    assert {name: span(case, name) for name in order} == ORDERS[order]


@pytest.mark.parametrize("order", ORDERS)
def test_levels_agree_with_where_the_ranks_are(order: tuple[str, ...]) -> None:
    """Ranks of one group counted node by node: as many nodes as the outer level says."""
    case = job(LLAMA, switched(8, 4), order=list(order), tp=2, cp=2, dp=4, pp=2)
    places = rank_places(case)
    for name in order:
        nodes = {place.node for place in places if place.groups[name] == 0}
        topology = spanned(case.cluster, group_runs(case.strategy, (name,)), "strategy")
        assert topology is not None
        outside = [level.size for level in topology.levels if level.name == "level 1"]
        assert len(nodes) == (outside[0] if outside else 1)


def test_a_group_of_one_has_no_network() -> None:
    case = job(LLAMA, switched(8), tp=8, dp=1)
    assert spanned(case.cluster, group_runs(case.strategy, ("cp", "dp")), "strategy") is None


def test_context_and_data_parallel_ranks_form_one_group() -> None:
    case = job(LLAMA, switched(8, 4), tp=2, cp=2, dp=4, pp=2)
    assert span(case, "cp", "dp") == "level 0 4 · level 1 2"
    apart = job(LLAMA, switched(8, 4), tp=2, cp=2, dp=4, pp=2, order=["cp", "pp", "dp", "tp"])
    assert span(apart, "cp", "dp") == "level 0 2 · level 0 2 · level 1 2"


def test_expert_groups() -> None:
    """32 ranks of a stage on nodes of 8: expert_tp 1, ep 16 spans two nodes, each expert is on two ranks."""
    strategy = Strategy(tp=2, dp=16, ep=16, expert_tp=1)
    cluster = switched(8, 4)
    for runs, expected in ((expert_runs(strategy), (8, 2)), (expert_data_runs(strategy), (2,))):
        topology = spanned(cluster, runs, "strategy.ep")
        assert topology is not None
        assert tuple(level.size for level in topology.levels) == expected


def test_expert_tensor_parallelism_lies_inside_expert_parallelism() -> None:
    cluster = switched(8, 2)
    topology = spanned(cluster, expert_runs(Strategy(tp=4, dp=4, ep=4)), "strategy.ep")
    assert topology is not None
    assert [(level.name, level.size) for level in topology.levels] == [("level 0", 2), ("level 1", 2)]


def test_copies_of_a_split_expert_lie_outside_both() -> None:
    """expert_tp 2 · ep 4 fill a node of 8; the other copy of each expert is in the other node."""
    topology = spanned(switched(8, 2), expert_data_runs(Strategy(tp=2, dp=8, ep=4)), "strategy.ep")
    assert topology is not None
    assert [(level.name, level.size) for level in topology.levels] == [("level 1", 2)]


def seconds(case: Job, dimension: str) -> float:
    return sum(t.seconds for t in step_traffic(case, rank_contents(case, 0)) if t.dimension == dimension)


def test_inside_a_node_is_faster_than_across() -> None:
    inside = job(LLAMA, switched(4, 4), tp=4, dp=4)
    across = job(LLAMA, switched(4, 4), tp=4, dp=4, order=["dp", "cp", "tp", "pp"])
    assert seconds(across, "tp") == pytest.approx(10 * seconds(inside, "tp"))  # 100 and 10 GB/s, no latency


def with_ports(ports: int | None) -> Any:
    cluster = switched(8, 2)
    levels = [level.to_dict() for level in cluster.levels]
    levels[1]["ports"] = ports
    return type(cluster).from_dict({**cluster.to_dict(), "levels": levels})


def test_a_shared_network_card_divides_its_bandwidth() -> None:
    """Eight tensor-parallel ranks each send their part of the boundary at once."""
    own, shared = (seconds(job(LLAMA, with_ports(ports), tp=8, dp=1, pp=2), "pp") for ports in (None, 2))
    assert shared == pytest.approx(4 * own)


def test_data_parallel_ranks_of_one_node_share_a_card_too() -> None:
    own, shared = (seconds(job(LLAMA, with_ports(ports), tp=8, dp=2), "dp") for ports in (8, 1))
    assert shared == pytest.approx(8 * own)


@pytest.mark.parametrize(
    ("dimension", "axes"),
    [("tp", [(4, True, 1)]), ("cp", [(2, False, 1)]), ("dp", [(2, True, 2), (4, True, 1)])],
)
def test_torus_axes(dimension: str, axes: list[tuple[int, bool, int]]) -> None:
    """4x4x4: tp takes the first axis whole (a ring), cp half of the second (a line), dp every second
    of it and the third."""
    case = job(LLAMA, "tpu-v5p:4x4x4", tp=4, cp=2, dp=8, training={"seq": 128})
    topology = spanned(case.cluster, group_runs(case.strategy, (dimension,)), "strategy")
    assert topology is not None
    (level,) = topology.levels
    assert isinstance(level.shape, Grid)
    assert [(axis.size, axis.wrap, axis.stride) for axis in level.shape.axes] == axes


def test_a_torus_wraps_only_in_whole_multiples() -> None:
    small, large = (network(cluster_from(name)).levels[0].shape for name in ("tpu-v5p:2x4x4", "tpu-v5p:4x4x8"))
    assert isinstance(small, Grid)
    assert isinstance(large, Grid)
    assert [axis.wrap for axis in small.axes] == [False, True, True]
    assert [axis.wrap for axis in large.axes] == [True, True, True]


def test_groups_that_straddle_nodes_are_priced_by_the_links_they_cross() -> None:
    """tp 8 on nodes of 6 is 6 + 2, 4 + 4 or 2 + 6: two ports carry what enters the poorest node."""
    case = job(LLAMA, switched(6, 4), tp=8, dp=3)
    assert span(case, "tp") == "level 0 2 · level 1 4"
    assert span(case, "dp") == "level 1 3"
    inside, outside = job(LLAMA, switched(24), tp=8, dp=3), job(LLAMA, switched(1, 24), tp=8, dp=3)
    assert seconds(inside, "tp") < seconds(case, "tp") < seconds(outside, "tp")


def test_parts_of_a_group_are_ordered_by_level() -> None:
    """cp inside nodes of 6 and dp around pp straddle alike; the levels of both go from the inside out."""
    case = job(LLAMA, switched(6, 4), cp=2, pp=2, dp=6, order=["cp", "pp", "dp", "tp"], training={"seq": 128})
    topology = spanned(case.cluster, group_runs(case.strategy, ("cp", "dp")), "strategy")
    assert topology is not None
    assert topology.straddles
    assert [level.name for level in topology.levels] == sorted(level.name for level in topology.levels)
    assert topology.size == 12


def test_mixtures_on_several_levels_are_priced() -> None:
    case = job(MOE, switched(4, 2, 2), tp=2, dp=8, ep=16, expert_tp=1)
    assert seconds(case, "ep") > 0


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_faster_level_keeps_no_link_busy_for_longer(kind: CollectiveKind) -> None:
    """Bytes pass a level also while a round waits for a slower one: else a faster network would hide less."""
    (line, *_) = traffics(job(LLAMA, switched(4, 4, 2), dp=32), "dp")
    clusters = [switched(4, 4, 2, bandwidths=(32e9, 8e9, 4e9 * times)) for times in (1, 2, 4, 16, 64)]
    topologies = [network(one) for one in clusters]
    for algorithm in algorithm_names(kind, topologies[0]):
        costs = [collective_cost(kind, 2**26, one, algorithm) for one in topologies]
        busy = [replace(line, cost=one).level_seconds for one in costs]
        for slower, faster in pairwise(busy):
            assert all(faster[name] <= slower[name] for name in slower), (algorithm, slower, faster)
