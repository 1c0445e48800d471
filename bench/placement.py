"""One slow pair among four virtual nodes: a step with the ranks in the order of the nodes, and reordered.

The pairs are measured as by `doctor` and `bench collectives`, on a network of which one link is slow. From what was
measured the planner finds an order; both orders then train, and their steps are compared with the prediction. What a
ring reaches of equal links is measured first, on the network before a link is slow. All links are slow, so that they
and not the cores of this machine are the pace. Needs root.

    python bench/placement.py [--steps 6] [--slow 0.2] [--repeats 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import shardwise
from shardwise.collectives import CollectiveKind
from shardwise.launch.emulate.network import EmulatedPool
from shardwise.measure.calibrate.ranks import PoolRanks
from shardwise.measure.collectives.pairs import measured_matrix, wiring_of
from shardwise.measure.collectives.request import levels_of, requests
from shardwise.measure.collectives.run import PRELOAD, measure_in
from shardwise.planner.placement import place_nodes
from shardwise.run.metrics.lines import read_lines
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.units import readable_rate, readable_seconds
from shardwise.spec.wiring import Wiring

NODES, RATE, DELAY = 4, "5Mbit", "1ms"
SLOW_PAIR = (1, 2)
# Strategy, global batch, tokens of a sequence.
LAYOUTS: tuple[tuple[dict[str, int], int, int], ...] = (
    ({"dp": 4}, 4, 16), ({"dp": 4, "zero": 1}, 4, 16), ({"pp": 4}, 4, 512),
)  # fmt: skip
SKIPPED = 2  # first steps of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slow", type=float, default=0.2, help="the slow pair's share of the rate")
    parser.add_argument("--repeats", type=int, default=1, help="of both runs, in turn; the fastest of each counts")
    parsed = parser.parse_args()
    emulation = Emulation.parse(f"{NODES}x1,{RATE},{DELAY}")
    with tempfile.TemporaryDirectory() as folder:
        hosts = [f"node-{node}" for node in range(NODES)]
        calibrated = with_share(cluster_of(emulation, cluster_from("laptop")), emulation)
        share = calibrated.levels[-1].reached_share
        wiring = measure(emulation, parsed.slow, hosts)
        for link in wiring.links:
            figures = f"{readable_rate(link.bandwidth)}, {readable_seconds(link.latency)}"
            print(f"measured  {' with '.join(link.between)}: {figures}")
        print(f"measured  a ring over equal links: {share:.0%} of their rate")
        cluster = replace(calibrated, wiring=wiring)
        print(f"\n{'layout':<16}  {'nodes':<12}  {'order':<8}  {'predicted':>10}  {'measured':>10}")
        for layout, batch, seq in LAYOUTS:
            training = {"global_batch": batch, "seq": seq, "precision": "fp32"}
            run = {"steps": parsed.steps, "emulate": str(emulation), "evaluation": {"batches": 0}}
            given = {"model": "tiny", "cluster": cluster, "strategy": layout, "training": training, "run": run}
            compare(Job.from_dict(given), parsed.repeats, Path(folder))


def with_share(cluster: Cluster, emulation: Emulation) -> Cluster:
    """The cluster with the share of its links' rate that gloo's all-reduce reaches, as `calibrate` would find it."""
    (level,) = (one for one in levels_of(cluster) if one.name == "world")
    (request,) = requests(
        cluster, [level], [CollectiveKind.ALL_REDUCE], ("backend",), (2**20,), warm_up=1, repeats=3, most_seconds=60.0
    )
    with EmulatedPool(emulation, PRELOAD) as pool:
        (found,) = measure_in(pool, request)
    share = min(1.0, found.bus_bandwidth / emulation.rate)
    return cluster.with_level(len(cluster.levels) - 1, replace(cluster.levels[-1], efficiency=share))


def measure(emulation: Emulation, slow: float, hosts: list[str]) -> Wiring:
    with EmulatedPool(emulation, PRELOAD) as pool:
        pool.network.reshape(rate=slow * emulation.rate, pair=SLOW_PAIR)
        return wiring_of(hosts, measured_matrix(PoolRanks(pool, NODES, 1), NODES, "cpu"), "bench/placement.py")


def compare(job: Job, repeats: int, folder: Path) -> None:
    assert job.cluster.wiring is not None
    found = place_nodes(job, job.cluster.wiring.hosts)
    assert found is not None
    strategy = job.strategy
    layout = f"dp={strategy.dp} pp={strategy.pp}" + (f" zero={strategy.zero}" if strategy.zero else "")
    orders = {"as they are": (found.given, found.given_seconds), "reordered": (found.hosts, found.seconds)}
    measured: dict[str, list[float]] = {name: [] for name in orders}
    for repeat in range(repeats):
        for name in orders:
            place = folder / f"{layout}-{repeat}-{name}".replace(" ", "-")
            measured[name].append(trained(job, name == "reordered", place))
    for name, (hosts, predicted) in orders.items():
        order = " ".join(host.removeprefix("node-") for host in hosts)
        figures = f"{readable_seconds(predicted):>10}  {readable_seconds(min(measured[name])):>10}"
        print(f"{layout:<16}  {name:<12}  {order:<8}  {figures}")
    ratio = min(measured["as they are"]) / min(measured["reordered"])
    print(f"{'':<16}  {'ratio':<22}  {found.given_seconds / found.seconds:>10.2f}  {ratio:>10.2f}\n")


def trained(job: Job, reorder: bool, folder: Path) -> float:
    """The median step of a run, without its first ones."""
    done = shardwise.train(replace(job, run=replace(job.run, reorder=reorder)), run_folder=folder)
    assert done.ok, done.failure
    seconds = [float(one["seconds"]) for one in read_lines(folder / "metrics.jsonl") if one.get("seconds")]
    return statistics.median(seconds[SKIPPED:])


if __name__ == "__main__":
    assert os.geteuid() == 0, "virtual nodes need root"
    main()
