"""Planned and real placement, compared before a run; virtual nodes with one slow link."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from required import require
from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.network import why_not, wired
from shardwise.launch.ray.cluster import ranks_of_bundles, wanted_order
from shardwise.launch.resume import on_nodes
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.job import Job
from shardwise.spec.wiring import PairLink, Wiring

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
SLOW = PairLink(between=HOSTS[1:3], bandwidth=5e6, latency=1e-3)


def job(**run: object) -> Job:
    emulation = Emulation.parse("4x1,200Mbit,1ms")
    cluster = replace(cluster_of(emulation, cluster_from("laptop")), wiring=Wiring(hosts=HOSTS, links=(SLOW,)))
    training = {"global_batch": 64, "seq": 64, "precision": "fp32"}
    return Job.from_dict({"model": "tiny", "cluster": cluster, "strategy": {"dp": 4}, "training": training, "run": run})


def hosts_of(placed: Job) -> tuple[str, ...] | None:
    return None if placed.cluster.wiring is None else placed.cluster.wiring.hosts


def test_nodes_are_reordered_and_it_is_said_why() -> None:
    placed, (note,) = on_nodes(job(), HOSTS, started=False)
    emulated = job(emulate="4x1,200Mbit,1ms")
    assert hosts_of(on_nodes(emulated, None, started=False)[0]) == hosts_of(placed)
    assert on_nodes(job(), None, started=False) == (job(), [])  # a manager chooses
    assert hosts_of(placed) == (HOSTS[0], HOSTS[1], HOSTS[3], HOSTS[2])
    assert note.startswith("ranks go to the nodes in another order: 10.0.0.1, 10.0.0.2, 10.0.0.4, 10.0.0.3: a step of")
    assert " instead of " in note and note.endswith(" is predicted")


def test_nodes_that_stay_cost_something_which_is_said() -> None:
    placed, (note,) = on_nodes(job(), HOSTS, started=True)
    assert hosts_of(placed) == HOSTS and note.startswith("the nodes are not in their best order, 10.0.0.1, 10.0.0.2, ")
    assert note.endswith("start the ranks on the hosts in that order")
    placed, (note,) = on_nodes(job(reorder=False), HOSTS, started=False)
    assert hosts_of(placed) == HOSTS and note.endswith("run.reorder: true does it")
    better = (HOSTS[0], HOSTS[1], HOSTS[3], HOSTS[2])
    assert on_nodes(job(), better, started=True)[1] == []


def test_a_wiring_of_other_hosts_is_not_used() -> None:
    placed, notes = on_nodes(job(), (*HOSTS[:3], "elsewhere"), started=False)
    assert (hosts_of(placed), notes) == (None, ["cluster.wiring is not used: it does not know elsewhere"])
    placed, notes = on_nodes(job(), HOSTS[:3], started=False)
    assert (hosts_of(placed), notes) == (None, ["cluster.wiring is not used: it names 3 of 4 nodes"])
    plain = replace(job(), cluster=replace(job().cluster, wiring=None))
    assert on_nodes(plain, HOSTS, started=False) == (plain, [])


@given(st.permutations(range(4)))
def test_ray_places_its_nodes_by_the_wiring(bundles: list[int]) -> None:
    addresses = {f"node{number}": host for number, host in enumerate(HOSTS)}
    where = [f"node{number}" for number in bundles]
    wanted = wanted_order(job(), [addresses[name] for name in where])
    ranks = ranks_of_bundles(where, 1, addresses, wanted)
    placed = sorted(zip((one.start for one in ranks), (addresses[name] for name in where)))
    assert [host for _, host in placed] == [HOSTS[0], HOSTS[1], HOSTS[3], HOSTS[2]]
    assert wanted_order(job(reorder=False), HOSTS) == ()


def test_virtual_nodes_have_the_links_of_the_wiring() -> None:
    """A connection takes a round trip, which cannot be shorter than twice the delay of its link."""
    require("emulate", why_not())
    emulation = Emulation.parse("3x1,800Mbit,0ms")
    links = (
        PairLink(between=("a", "b"), bandwidth=2e6, latency=0.2),
        PairLink(between=("b", "c"), bandwidth=2e6, latency=0.0),
    )
    seconds = {}
    with wired(emulation, Wiring(hosts=("b", "c", "a"), links=links)) as network:
        for node in (1, 2):
            with namespace.returning():
                namespace.enter(network.namespace(node))
                server = socket.create_server((namespace.address(node), 0))
            with server, namespace.returning():
                namespace.enter(network.namespace(0))
                began = time.perf_counter()
                socket.create_connection(server.getsockname()).close()
                seconds[node] = time.perf_counter() - began
    assert seconds[2] >= 0.4 > seconds[1]
