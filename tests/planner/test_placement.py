"""Which node gets which ranks: slow links are kept out of rings and pipelines, and priced where they are in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.analysis import analyze
from shardwise.planner.placement import device_order, place_nodes, placement_words, spread
from shardwise.spec import SpecError
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.job import Job
from shardwise.spec.wiring import Wiring

HOSTS = ("a", "b", "c", "d")
TRAINING = {"global_batch": 64, "seq": 64, "precision": "fp32"}
CLUSTER = cluster_of(Emulation.parse("4x1,200Mbit,1ms"), cluster_from("laptop"))


def job(links: dict[tuple[str, str], float], hosts: tuple[str, ...] = HOSTS, **strategy: Any) -> Job:
    """On four nodes of one rank, with the bandwidths of some pairs in bytes/s."""
    wiring = {
        "hosts": hosts,
        "links": [{"between": pair, "bandwidth": rate, "latency": 1e-3} for pair, rate in links.items()],
    }
    cluster = replace(CLUSTER, wiring=wiring)
    return Job.from_dict({"model": "tiny", "cluster": cluster, "strategy": strategy, "training": TRAINING})


def used(order: tuple[str, ...], *, ring: bool) -> set[frozenset[str]]:
    pairs = list(pairwise(order)) + ([(order[-1], order[0])] if ring else [])
    return {frozenset(pair) for pair in pairs}


@pytest.mark.parametrize("strategy", [{"dp": 4}, {"pp": 4}, {"tp": 4}, {"cp": 4}, {"dp": 4, "zero": 3}], ids=str)
def test_a_slow_pair_is_not_used(strategy: dict[str, int]) -> None:
    for slow in combinations(HOSTS, 2):
        found = place_nodes(job({slow: 5e6}, **strategy), HOSTS)
        assert found is not None and sorted(found.hosts) == list(HOSTS)
        ring = "pp" not in strategy
        assert frozenset(slow) not in used(found.hosts, ring=ring)
        if frozenset(slow) in used(HOSTS, ring=ring):
            words = placement_words(found)
            assert found.gain > 0.1 and words is not None and " instead of " in words
        else:
            assert found.hosts == HOSTS and placement_words(found) is None


def test_a_link_of_the_ring_is_priced_as_if_all_were_as_slow() -> None:
    alone = analyze(job({("b", "c"): 5e6}, dp=4)).predicted_seconds
    every = analyze(job(dict.fromkeys(combinations(HOSTS, 2), 5e6), dp=4)).predicted_seconds
    level = replace(CLUSTER.levels[1], bandwidth=5e6)
    slower = replace(job({}, dp=4), cluster=CLUSTER.with_level(1, level))
    assert alone == pytest.approx(every) and every == pytest.approx(analyze(slower).predicted_seconds)
    beside = analyze(job({("a", "c"): 5e6}, dp=4)).predicted_seconds
    assert beside == analyze(job({}, dp=4)).predicted_seconds < alone
    faster = dict.fromkeys(combinations(HOSTS, 2), 1e12)
    assert analyze(job(faster, dp=4)).predicted_seconds == beside  # never better than the plan


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e6, 5e7), min_size=6, max_size=6), st.sampled_from(["dp", "pp", "cp"]))
def test_no_order_is_predicted_to_be_slower_than_the_given_one(rates: list[float], dimension: str) -> None:
    given = job(dict(zip(combinations(HOSTS, 2), rates)), **{dimension: 4})
    found = place_nodes(given, HOSTS)
    assert found is not None and found.seconds <= found.given_seconds
    assert found.seconds == analyze(found.job).predicted_seconds
    assert found.job.cluster.wiring is not None and found.job.cluster.wiring.hosts == found.hosts


def test_of_more_hosts_than_are_needed_the_slow_one_stays_idle() -> None:
    hosts = ("bad", *HOSTS)
    found = place_nodes(job({("bad", other): 1e6 for other in HOSTS}, hosts, dp=4), hosts)
    assert found is not None and sorted(found.hosts) == list(HOSTS)


def test_nodes_of_one_switch_become_neighbours() -> None:
    hosts = tuple(f"n{number}" for number in range(8))
    switches = {host: (f"leaf{number % 2}", "spine") for number, host in enumerate(hosts)}
    cluster = replace(cluster_from("dgx-h100:8"), wiring=Wiring(hosts=hosts, switches=switches))
    strategy = {"tp": 8, "dp": 4, "pp": 2}
    one = Job.from_dict(
        {"model": "llama3-8b", "cluster": cluster, "strategy": strategy, "training": {"global_batch": 64}}
    )
    found = place_nodes(one, hosts)
    assert found is not None
    leaves = [switches[host][0] for host in found.hosts]
    assert len(set(leaves[:4])) == len(set(leaves[4:])) == 1  # a data-parallel group has four nodes
    words = placement_words(found)
    assert words is not None and words.endswith("with the same predicted step")


def test_a_switch_further_up_has_the_price_of_its_level() -> None:
    cluster = cluster_from("dgx-h100:4")
    inner, fast = cluster.levels
    slow = replace(fast, name="spine", size=2, bandwidth=fast.bandwidth_per_direction / 8)
    leaves = replace(cluster, levels=(inner, replace(fast, size=2), slow))
    apart = {"a": ("l0", "s"), "b": ("l1", "s"), "c": ("l0", "s"), "d": ("l1", "s")}
    wired = replace(leaves, wiring=Wiring(hosts=HOSTS, switches=apart))
    strategy = {"tp": 8, "dp": 2, "pp": 2}
    fields = {"model": "llama3-8b", "strategy": strategy, "training": {"global_batch": 64}}
    one = Job.from_dict({**fields, "cluster": wired})
    found = place_nodes(one, HOSTS)
    assert found is not None and {frozenset(found.hosts[:2]), frozenset(found.hosts[2:])} == {
        frozenset("ac"),
        frozenset("bd"),
    }
    assert found.seconds == pytest.approx(analyze(Job.from_dict({**fields, "cluster": leaves})).predicted_seconds)
    assert found.seconds < found.given_seconds


def test_devices_of_a_node() -> None:
    pairs = [[0, 9, 1, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 1, 9, 0]]
    assert device_order(pairs, 2) == (0, 2, 1, 3) and spread(pairs, (0, 1)) == (9, 9)
    assert device_order([[0] * 8 for _ in range(8)], 4) == tuple(range(8))


@pytest.mark.parametrize(
    ("wiring", "line"),
    [
        ({"hosts": ["a", "a"]}, "hosts: ['a', 'a']; name every host once"),
        ({"hosts": []}, "name every host once"),
        ({"hosts": ["a"], "switches": {"b": ["s"]}}, "switches: 'b' is not one of the hosts"),
        ({"hosts": ["a"], "links": [{"between": ["a", "a"], "bandwidth": 1, "latency": 0}]}, "are not two hosts"),
        (
            {"hosts": ["a"], "links": [{"between": ["a", "b"], "bandwidth": 1, "latency": 0}]},
            "links[0]: 'b' is not one",
        ),
        ("no.yaml", "no.yaml"),
        (3, "3 is not a wiring"),
    ],
    ids=str,
)
def test_a_wrong_wiring_is_one_line(wiring: object, line: str) -> None:
    with pytest.raises(SpecError) as error:
        replace(CLUSTER, wiring=wiring)  # type: ignore[arg-type]
    assert line in str(error.value) and str(error.value).startswith("wiring")
