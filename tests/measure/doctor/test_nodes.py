"""`doctor` on several nodes: what differs is found, and the node that differs is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import error_line, run
from launch.targets.ssh_hosts import SshHosts, ssh_hosts
from shardwise.interop.fabric import InfinibandPort, read_topology
from shardwise.measure.collectives.pairs import PairFigures, rounds_of_pairs, slow_pairs
from shardwise.measure.doctor.ranks import (
    SeenFiles,
    clocks_finding,
    pairs_findings,
    planned_pair,
    ports_finding,
    shared_finding,
)
from shardwise.measure.doctor.software import NodeFacts, compared, gpu_findings
from shardwise.spec.clusters import cluster_from
from shardwise.spec.wiring import wiring_from

FILES = Path(__file__).parents[2] / "interop" / "fabric"
HOSTS = ("a", "b", "c", "d")
UP = InfinibandPort("mlx5_0/1", "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand")
DOWN = InfinibandPort("mlx5_0/1", "DOWN", "Polling", "10 Gb/sec (4X)", "InfiniBand")


def facts(
    torch: str = "2.13.0", links: tuple[str, ...] = ("26 GB/s", "26 GB/s"), port: InfinibandPort = UP
) -> NodeFacts:
    return NodeFacts({"Python": "3.11.7", "torch": torch}, {0: links, 1: links}, (port,))


def test_the_host_with_other_versions_links_or_ports_is_named() -> None:
    same = [one.status for one in compared(dict.fromkeys(HOSTS, facts()))]
    assert same == ["pass", "pass", "pass"]
    odd = {**dict.fromkeys(HOSTS, facts()), "c": facts(torch="2.12.0")}
    software, nvlink, infiniband = compared(odd)
    assert (software.status, software.figure) == ("fail", "torch is 2.12.0 on c; 2.13.0 on the 3 others")
    _, nvlink, _ = compared({**dict.fromkeys(HOSTS, facts()), "b": facts(links=("26 GB/s", "<inactive>"))})
    assert nvlink.status == "fail" and "b has 1 + 1 links up, others 2 + 2; link 1 of GPU 0 on b" in nvlink.figure
    _, _, infiniband = compared({**dict.fromkeys(HOSTS, facts()), "d": facts(port=DOWN)})
    assert infiniband.status == "fail" and "port mlx5_0/1 is down (Polling) on d; up at 400 Gb" in infiniband.figure


def test_what_is_off_everywhere_is_not_odd() -> None:
    _, nvlink, infiniband = compared(dict.fromkeys(HOSTS, facts(links=("26 GB/s", "<inactive>"), port=DOWN)))
    assert (nvlink.status, infiniband.status) == ("pass", "warn")
    alone = NodeFacts({"Python": "3.11.7"}, None, ())
    assert [one.status for one in compared({"a": alone, "b": alone})] == ["pass", "pass", "pass"]


def test_tensor_parallel_groups_belong_on_gpus_with_nvlinks() -> None:
    bridges = read_topology((FILES / "topo_bridges.txt").read_text())
    alone = NodeFacts({}, None, (), bridges)
    (order,) = gpu_findings({"a": alone}, 2)
    assert order.status == "warn" and order.figure == "a: GPUs 0 and 1 of one tp group are joined by NODE"
    assert order.remedy.startswith("CUDA_VISIBLE_DEVICES=0,2,1,3 ")
    switched = NodeFacts({}, None, (), read_topology((FILES / "topo_h100.txt").read_text()))
    assert [one.status for one in gpu_findings({"a": switched}, 4)] == ["pass"]
    assert list(gpu_findings({"a": alone}, 4)) == [] == list(gpu_findings({"a": facts()}, 2))


@given(st.integers(2, 40))
def test_every_two_nodes_meet_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= nodes + nodes % 2 - 1


def measured(slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], PairFigures]:
    pairs = [pair for pairs in rounds_of_pairs(4) for pair in pairs]
    return {pair: PairFigures(slow.get(pair, 100e6), 1e-4) for pair in sorted(pairs)}


def test_a_slow_pair_and_a_slow_host_are_told_apart() -> None:
    one = measured({(1, 2): 10e6})
    bandwidth, latency = pairs_findings(one, HOSTS, None)
    assert (bandwidth.status, latency.status) == ("fail", "pass")
    assert bandwidth.figure == "b with c 10.0 MB/s; others 100 MB/s" and slow_pairs(one) == [(1, 2)]
    host = measured({(0, 3): 60e6, (1, 3): 60e6, (2, 3): 60e6})
    bandwidth, _ = pairs_findings(host, HOSTS, None)
    assert bandwidth.status == "warn" and bandwidth.figure == "d with every other host 60.0 MB/s; others 100 MB/s"
    late = {**measured({}), (0, 1): PairFigures(100e6, 5e-3)}
    assert "a with b 5.00 ms" in list(pairs_findings(late, HOSTS, None))[1].figure


def test_links_against_the_planned_ones() -> None:
    cluster = cluster_from("dgx-h100:4")
    promised = planned_pair(cluster, (0, 3)).bandwidth
    assert promised == cluster.levels[1].bandwidth_per_direction * cluster.levels[1].reached_share
    slower = {pair: PairFigures(promised / 2, 1e-5) for pair in measured({})}
    bandwidth, _ = pairs_findings(slower, HOSTS, cluster)
    assert bandwidth.status == "warn" and "planned" in bandwidth.figure and "calibrate" in bandwidth.remedy
    bandwidth, _ = pairs_findings({pair: PairFigures(promised, 1e-5) for pair in slower}, HOSTS, cluster)
    assert bandwidth.status == "pass"


def test_clocks_ports_and_folders() -> None:
    assert clocks_finding([0.0, 1e-4, 0.0, -90.0], HOSTS).status == "fail"
    assert "(a is farthest)" in clocks_finding([0.0, 2.0, 2.0, 2.0], HOSTS).figure  # the reference is the odd one
    closed = ports_finding([[(3, "d:1: timed out")], [(3, "d:1: timed out")], [], [(0, "x")]], HOSTS)
    assert closed.status == "fail" and closed.figure.endswith("3 of 3 such pairs are with d")
    every, alone = frozenset(range(4)), frozenset({2})
    seen = [SeenFiles(every - alone if node != 2 else alone, "nfs4") for node in range(4)]
    odd = shared_finding(seen, HOSTS, Path("/runs"), is_run=True)
    assert (odd.status, odd.figure) == ("fail", "c has another /runs than the 3 others")
    own = [SeenFiles(frozenset({node}), "ext4") for node in range(4)]
    assert "is another folder on every host" in shared_finding(own, HOSTS, Path("/runs"), is_run=False).figure


# -- on real hosts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), 3) as found:
        yield found


@pytest.mark.slow
def test_the_slow_one_of_three_hosts_is_named_and_all_pairs_are_written(three_hosts: SshHosts, tmp_path: Path) -> None:
    shape = f"tc qdisc add dev {three_hosts.interfaces[2]} root tbf rate 200mbit burst 256kb latency 50ms"
    subprocess.run(shape.split(), check=True)
    given = [
        "--on",
        str(three_hosts.file),
        "--run-folder",
        str(tmp_path),
        "--wiring",
        str(tmp_path / "w.yaml"),
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SHARDWISE_SSH": three_hosts.ssh}
    command = [sys.executable, "-m", "shardwise", "doctor", *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    checks = {one["check"]: one for one in found["findings"]}
    slow = three_hosts.addresses[2]
    assert checks["bandwidth"]["figure"].startswith(f"{slow} with every other host "), done.stdout
    for name in ("same software", "open ports", "clocks", "shared folder", "all-reduce"):
        assert checks[name]["status"] == "pass", checks[name]
    wiring = wiring_from(str(tmp_path / "w.yaml"))
    assert wiring.hosts == three_hosts.addresses and len(wiring.links) == 3
    fast, to_slow = wiring.link(0, 1), wiring.link(0, 2)
    assert fast is not None and to_slow is not None and fast.bandwidth > 2 * to_slow.bandwidth
    assert [path.name for path in tmp_path.iterdir()] == ["w.yaml"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--on", "cpu"], "--on: cpu is a device, not a launch target; say --run-device cpu"),
        (["--on", "ray"], "--cluster: is missing: nothing else says how many ranks on ray"),
        (["--on", "no/hosts.txt"], "--on: there is no file of hosts 'no/hosts.txt'"),
        (["--wiring", "w.yaml"], "--wiring: is for several nodes"),
        (["--switches", "t.conf"], "--switches: is for --wiring; give both"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str) -> None:
    assert line in error_line(run("doctor", *arguments))
