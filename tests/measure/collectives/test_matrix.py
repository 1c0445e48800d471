"""The matrix that `bench collectives` measures on virtual nodes, as the wiring by which ranks are placed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli.running import error_line, run
from required import require
from shardwise.launch.emulate.network import why_not
from shardwise.planner.placement import place_nodes
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.files import dump_yaml
from shardwise.spec.job import Job
from shardwise.spec.wiring import PairLink, Wiring, wiring_from

HOSTS = ("a", "b", "c", "d")
NODES = "4x1,100Mbit,1ms"
SLOW = PairLink(between=("b", "c"), bandwidth=2e6, latency=1e-3)


def job(wiring: Wiring, **strategy: int) -> Job:
    cluster = replace(cluster_of(Emulation.parse(NODES), cluster_from("laptop")), wiring=wiring)
    training = {"global_batch": 64, "seq": 64, "precision": "fp32"}
    return Job.from_dict({"model": "tiny", "cluster": cluster, "strategy": strategy, "training": training})


@pytest.mark.slow
def test_the_measured_matrix_gives_the_order_of_the_declared_links(tmp_path: Path) -> None:
    require("emulate", why_not())
    declared = Wiring(hosts=HOSTS, links=(SLOW,))
    described, out = tmp_path / "cluster.yaml", tmp_path / "wiring.yaml"
    described.write_text(dump_yaml(job(declared, dp=4).cluster.to_dict()))
    short = ["--kinds", "all_reduce", "--algorithms", "backend", "--levels", "world", "--max-bytes", "64"]
    done = run("bench", "collectives", "--emulate", NODES, "--cluster", str(described), *short, "--wiring", str(out))
    assert done.status == 0, done
    measured = wiring_from(str(out))
    assert measured.hosts == HOSTS and len(measured.links) == 6
    slowest = min(measured.links, key=lambda one: one.bandwidth)
    assert set(slowest.between) == {"b", "c"}
    assert slowest.bandwidth == pytest.approx(SLOW.bandwidth, rel=0.25)
    assert f"every two of {len(HOSTS)} nodes" in done.out and "b and c" in done.out
    ring = [place_nodes(job(one, dp=4), HOSTS) for one in (declared, measured)]
    assert ring[0] is not None and ring[1] is not None
    assert ring[0].hosts == ring[1].hosts == ("a", "b", "d", "c")
    # A line of four stages has many orders without the slow link, which noise may choose among.
    line = place_nodes(job(measured, pp=4), HOSTS)
    best = place_nodes(job(declared, pp=4), HOSTS)
    assert line is not None and best is not None
    as_declared = place_nodes(job(declared, pp=4), line.hosts)
    assert as_declared is not None and as_declared.given_seconds == pytest.approx(best.seconds)


def test_one_node_has_no_matrix(tmp_path: Path) -> None:
    line = error_line(run("bench", "collectives", "--wiring", str(tmp_path / "w.yaml")))
    assert "--wiring: is for several nodes; use --emulate or --on, or start it on several hosts" in line
    line = error_line(run("bench", "collectives", "--emulate", NODES, "--wiring", str(tmp_path / "no" / "w.yaml")))
    assert "--wiring: " in line and "cannot be written" in line
