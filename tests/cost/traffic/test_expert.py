"""Expert parallelism: plain and deduplicated exchange of tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from cost.builders import MOE, job, sent, switched
from shardwise.collectives import Topology
from shardwise.cost.traffic.expert import deduplicated_cost, expert_traffic
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.groups import expected_destinations
from shardwise.layout.stages import rank_contents
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import MixtureOfExperts

TOKEN = 64 * 2  # bytes of one token


def exchanges(cluster: Cluster | None = None, **strategy: Any) -> list[Traffic]:
    case = job(MOE, cluster, **{"collective": "direct", "tp": 1, **strategy})
    return expert_traffic(case, rank_contents(case, 0))


def test_every_token_travels_once_per_chosen_expert() -> None:
    """T·k·h·e·(E−1)/E, dispatch and combine, forward and backward, in 6 layers."""
    found = exchanges(dp=8, ep=8)
    assert len(found) == 4
    assert sent(found) == pytest.approx(4 * 6 * 128 * 4 * TOKEN * 7 / 8)


def test_mixtures_that_run_again_exchange_their_tokens_again() -> None:
    once, again = (exchanges(dp=8, ep=8, **more) for more in ({}, {"recompute": "selective",
                                                                   "recompute_operators": ("experts",)}))  # fmt: skip
    assert sent(again) == pytest.approx(1.5 * sent(once))


def test_eight_bit_dispatch_halves_only_the_way_there() -> None:
    plain = job(MOE, dp=8, ep=8, training={"precision": "fp8"})
    case = replace(plain, stack=replace(plain.stack, fp8_dispatch=True))
    sizes = {t.what: t.size_bytes for t in expert_traffic(case, rank_contents(case, 0))}
    assert sizes["dispatch, forward"] == 128 * 4 * 64
    assert sizes["combine, forward"] == 128 * 4 * TOKEN


def test_sequence_parallel_ranks_send_their_own_tokens() -> None:
    whole = sent(exchanges(dp=8, ep=8))
    assert sent(exchanges(dp=4, tp=2, ep=8, expert_tp=1)) == pytest.approx(whole / 2)


def test_ranks_that_hold_the_same_tokens() -> None:
    """Without sequence parallelism: all of them to every slice of an expert, but each once to whole experts."""
    split = exchanges(dp=4, tp=2, ep=4, expert_tp=2, sequence_parallel=False)
    assert {t.size_bytes for t in split} == {128 * 4 * TOKEN}
    whole = exchanges(dp=4, tp=2, ep=8, expert_tp=1, sequence_parallel=False)
    assert {t.size_bytes for t in whole} == {64 * 4 * TOKEN}


@pytest.mark.parametrize(("strategy", "passes"), [({"recompute": "full"}, 2), ({"recompute_layers": 2}, 1.25)])
def test_recompute_dispatches_again(strategy: dict[str, Any], passes: float) -> None:
    plain = {t.what: t.count for t in exchanges(dp=8, ep=8)}
    again = {t.what: t.count for t in exchanges(dp=8, ep=8, **{"recompute": "full", **strategy})}
    assert again["dispatch, forward"] == passes * plain["dispatch, forward"]
    assert again["dispatch, backward"] == plain["dispatch, backward"]


@pytest.mark.parametrize(("experts", "places", "chosen"), [(4, 2, 3), (9, 3, 3), (8, 4, 2), (10, 5, 4), (4, 4, 4)])
def test_expected_destinations_by_enumeration(experts: int, places: int, chosen: int) -> None:
    """The mean number of distinct places over all sets of different experts."""
    choices = list(combinations(range(experts), chosen))
    mean = sum(len({expert * places // experts for expert in choice}) for choice in choices) / len(choices)
    assert expected_destinations(experts, places, chosen) == pytest.approx(mean)


def test_node_limited_routing_bounds_the_destinations() -> None:
    assert expected_destinations(256, 8, 8) == pytest.approx(5.295, abs=0.01)
    assert expected_destinations(256, 8, 8, limit=4) == 4
    assert expected_destinations(256, 2, 8, limit=4) == pytest.approx(2, abs=0.01)


def moe(**fields: Any) -> MixtureOfExperts:
    return MixtureOfExperts(experts=16, top_k=4, ffn=32, **fields)


def two_levels(ports: int | None = None) -> Topology:
    topology = Topology.hierarchical([4, 2], [100e9, 10e9], [0, 0])
    inner, outer = topology.levels
    return replace(topology, levels=(inner, replace(outer, ports=ports)))


def test_deduplicated_exchange_by_hand() -> None:
    """Once per distinct node over the slow level, once per distinct device inside; the slower sets the time."""
    nodes, devices = expected_destinations(16, 2, 4), expected_destinations(16, 8, 4)
    cost = deduplicated_cost(two_levels(), 1e6, moe())
    slow, fast = 1e6 * nodes / 2 / 10e9, 1e6 * devices * 3 / 4 / 100e9
    assert cost.seconds == pytest.approx(max(slow, fast))
    assert cost.sent_bytes == pytest.approx(1e6 * (nodes / 2 + devices * 3 / 4))


def test_devices_that_share_a_port_wait_for_each_other() -> None:
    alone, shared = (deduplicated_cost(two_levels(ports), 1e6, moe()).seconds for ports in (4, 1))
    assert shared == pytest.approx(4 * alone)


def test_a_torus_carries_tokens_over_its_busiest_link() -> None:
    """On a ring of 8 a link carries n²/8 = 8 blocks where a switch port carries 7: see the all-to-all."""
    ring, switch = (
        deduplicated_cost(topology, 1e6, moe()).seconds for topology in (Topology.ring(8, 1e9), Topology.switch(8, 1e9))
    )
    assert ring == pytest.approx(switch * 8 / 7)


def test_group_limited_routing_bounds_the_traffic_between_nodes() -> None:
    topology = Topology.hierarchical([2, 8], [1e15, 1e9], [0, 0])
    free, limited = (deduplicated_cost(topology, 1e6, m) for m in (moe(), moe(groups=8, groups_used=2)))
    assert free.seconds == pytest.approx(1e6 * expected_destinations(16, 8, 4) * 7 / 8 / 1e9)
    assert limited.seconds == pytest.approx(1e6 * 2 * 7 / 8 / 1e9)


def test_deduplication_never_sends_more_between_nodes() -> None:
    cluster = switched(4, 4)
    plain, once = (
        sum(t.seconds for t in exchanges(cluster, dp=16, ep=16, dispatch=how, collective="auto"))
        for how in ("all-to-all", "deduplicated")
    )
    assert once < plain
