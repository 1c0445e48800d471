"""How well a calibrated planner predicts links that it was not calibrated on, and what it chooses there.

    sudo PYTHONPATH=src python bench/calibration.py

Calibrates on virtual nodes, 2 x 2 ranks at 200 Mbit/s and 1 ms. Then, on other rates and delays, runs the backend's
collectives and our schedules beside their predictions, and asks which algorithm is predicted and which is measured to
be the fastest; and which of three strategies is the best for a small model over a slow link. Exits 1 where a figure
misses what is asked for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.collectives import CollectiveKind, build_schedule, collective_cost, simulated_seconds
from shardwise.cost.step.prediction import predict
from shardwise.engine.batch import Batch
from shardwise.engine.collectives import Communicator
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.launch.emulate.network import EmulatedPool
from shardwise.launch.pool import WorkerPlace
from shardwise.layout.network import network
from shardwise.measure.calibrate.run import CalibrationRequest, calibrate
from shardwise.measure.collectives.run import Operation
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job

CALIBRATED_ON = "2x2,200Mbit,1ms"
OTHERS = ("2x2,500Mbit,2ms", "2x2,100Mbit,3ms", "2x2,1Gbit,2ms", "2x2,300Mbit,1ms")
SIZES = (2**17, 2**20, 2**22, 2**24)
OURS = {
    "all_reduce": ("flat_ring", "hierarchical", "hierarchical_pipelined"),
    "all_gather": ("flat_ring", "hierarchical", "direct"),
    "reduce_scatter": ("flat_ring", "hierarchical", "direct"),
}
MEDIAN_ERROR, WORST_ERROR, CHOSEN_RIGHT, AS_GOOD_AS = 0.15, 0.35, 0.9, 1.05
BACKEND = "the backend's own"
STRATEGIES = {"dp": {"dp": 2, "microbatch": 4}, "tp": {"tp": 2, "dp": 1, "microbatch": 8},
              "pp": {"pp": 2, "dp": 1, "microbatch": 2}}  # fmt: skip
SLOW = "2x1,100Mbit,2ms"
PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.engine.collectives")


@dataclass(frozen=True)
class Row:
    link: str
    kind: str
    size: int
    algorithm: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=int, default=len(OTHERS), help="how many of the other links")
    parser.add_argument("--only", choices=("collectives", "strategies"))
    arguments = parser.parse_args()
    passed = True
    if arguments.only != "strategies":
        cluster = calibrated(CALIBRATED_ON, ("links",))
        rows = [row for link in OTHERS[: arguments.links] for row in collectives(link, cluster, arguments.rounds)]
        passed &= judge_errors(rows)
        passed &= judge_choices(rows)
    if arguments.only != "collectives":
        passed &= judge_strategies(calibrated(SLOW, ("device", "links")))
    return 0 if passed else 1


def calibrated(link: str, parts: tuple[str, ...]) -> Cluster:
    emulation = Emulation.parse(link)
    request = CalibrationRequest(cluster_of(emulation, cluster_from("laptop:1")), "cpu", 1, Path(), emulation, parts)
    began = time.perf_counter()
    found = calibrate(request, lambda text: None)
    print(f"calibrated on {link} in {time.perf_counter() - began:.0f} s")
    for one in found.residuals:
        print(f"  {one.what}: median {one.median_error:.1%}, worst {one.worst_error:.1%} of {one.figures} figures")
    return found.cluster


def collectives(link: str, base: Cluster, rounds: int) -> list[Row]:
    emulation = Emulation.parse(link)
    cluster = cluster_of(emulation, base)
    with EmulatedPool(emulation, PRELOAD) as pool:
        measured = pool.run(measure, emulation.world, cluster, rounds, timeout_seconds=1800)
    rows = []
    for (kind, size, algorithm), seconds in measured[0].items():
        slowest = max([seconds, *(one[kind, size, algorithm] for one in measured[1:])])
        rows.append(Row(link, kind, size, algorithm, slowest, predicted(cluster, kind, size, algorithm)))
    return rows


def measure(place: WorkerPlace, cluster: Cluster, rounds: int) -> dict[tuple[str, int, str], float]:
    torch.set_num_threads(1)
    ours = replace(network(cluster.run_by_schedules()), pipelined_levels=True)
    found: dict[tuple[str, int, str], float] = {}
    with process_group(place.rank, place.world, place.rendezvous_file):
        world = dist.group.WORLD
        assert world is not None
        communicator = Communicator(world)
        for kind, algorithms in OURS.items():
            for size in SIZES:
                operation = Operation(CollectiveKind(kind), world, size, torch.device("cpu"))
                calls = {BACKEND: operation.by_backend()}
                for name in algorithms:
                    schedule = build_schedule(kind, ours, name, size)
                    calls[name] = operation.by_schedule(communicator, schedule)
                times: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(rounds + 1):
                    for name, call in calls.items():
                        dist.barrier()
                        began = time.perf_counter()
                        for _ in range(repeats := 4 if size <= 2**18 else 1):
                            call()
                        times[name].append((time.perf_counter() - began) / repeats)
                for name, seconds in times.items():
                    found[kind, size, name] = statistics.median(seconds[1:])
    return found


def predicted(cluster: Cluster, kind: str, size: int, algorithm: str) -> float:
    if algorithm == BACKEND:
        return float(collective_cost(kind, size, network(cluster), "auto").seconds)
    ours = replace(network(cluster.run_by_schedules()), pipelined_levels=True)
    return simulated_seconds(build_schedule(kind, ours, algorithm, size), ours, size)


def judge_errors(rows: list[Row]) -> bool:
    print(
        f"\n{'link':<18}{'collective':<16}{'bytes':>10}  {'algorithm':<24}{'measured':>11}{'predicted':>11}{'error':>8}"
    )
    for row in rows:
        print(f"{row.link:<18}{row.kind:<16}{row.size:>10,}  {row.algorithm:<24}{row.measured * 1e3:>8.1f} ms"
              f"{row.predicted * 1e3:>8.1f} ms{row.error:>+8.0%}")  # fmt: skip
    errors = [abs(row.error) for row in rows]
    median, worst = statistics.median(errors), max(errors)
    passed = median <= MEDIAN_ERROR and worst <= WORST_ERROR
    print(f"\n{len(rows)} collectives on links that were not calibrated: median error {median:.1%} (at most "
          f"{MEDIAN_ERROR:.0%}), worst {worst:.1%} (at most {WORST_ERROR:.0%}): {verdict(passed)}")  # fmt: skip
    return passed


def judge_choices(rows: list[Row]) -> bool:
    cases: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.link, row.kind, row.size), []).append(row)
    right = 0
    for (link, kind, size), options in cases.items():
        chosen = min(options, key=lambda row: row.predicted)
        fastest = min(options, key=lambda row: row.measured)
        good = chosen.measured <= AS_GOOD_AS * fastest.measured
        right += good
        if not good:
            print(f"{link} {kind} {size:,}: chose {chosen.algorithm} ({chosen.measured * 1e3:.1f} ms), fastest is "
                  f"{fastest.algorithm} ({fastest.measured * 1e3:.1f} ms)")  # fmt: skip
    passed = right >= CHOSEN_RIGHT * len(cases)
    print(f"the predicted fastest is the fastest, or within 5% of it, in {right} of {len(cases)}: {verdict(passed)}")
    return passed


def judge_strategies(cluster: Cluster) -> bool:
    emulation = Emulation.parse(SLOW)
    jobs = {name: strategy_job(cluster, strategy) for name, strategy in STRATEGIES.items()}
    planned = {name: predict(job).step_seconds for name, job in jobs.items()}
    with EmulatedPool(emulation, PRELOAD) as pool:
        seconds = {name: max(pool.run(step_seconds, 2, job, timeout_seconds=600)) for name, job in jobs.items()}
    print(f"\na small model over {SLOW}")
    for name in jobs:
        print(f"  {name} 2: measured {seconds[name] * 1e3:.0f} ms, predicted {planned[name] * 1e3:.0f} ms "
              f"({planned[name] / seconds[name] - 1:+.0%})")  # fmt: skip
    passed = min(planned, key=planned.__getitem__) == min(seconds, key=seconds.__getitem__)
    print(f"the best by prediction is the best by measurement: {verdict(passed)}")
    return passed


def strategy_job(cluster: Cluster, strategy: dict[str, int]) -> Job:
    job = Job.from_dict(
        {
            "model": {"layers": 4, "hidden": 128, "heads": 4, "ffn": 384, "vocab": 1024, "max_seq": 128},
            "cluster": "laptop:2",
            "strategy": strategy,
            "training": {"global_batch": 8, "seq": 128, "precision": "fp32"},
        }
    )
    return replace(job, cluster=cluster)


def step_seconds(place: WorkerPlace, job: Job) -> float:
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        engine = Engine(job)
        tokens = torch.randint(0, job.model.vocab, (job.sequences // job.strategy.data_parallel, job.training.seq))
        times = []
        for _ in range(8):
            dist.barrier()
            began = time.perf_counter()
            engine.step(Batch.of(tokens, tokens))
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def verdict(passed: bool) -> str:
    return "passed" if passed else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
