"""Two replicas, one at half the speed: are shares by speed faster than equal ones, as predicted? The same for stages.

    python bench/mixed.py            # dp 2 with shares 2:1, then pp 2 with layers by speed

Both ways of a pair train the same global batch with the same slow rank, in turn on the same processes; the figure is
the ratio of their median steps, beside that of their predicted steps on a cluster of two kinds of which one has half
the speed. Exits 1 unless what is predicted to be faster is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from recut import TIMES, slow_down
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.launch.pool import Pool
from shardwise.launch.pool import WorkerPlace as PoolPlace
from shardwise.measure.reference import sample_batch
from shardwise.models.layer import Layer
from shardwise.planner.candidate import candidate
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.presets import resolve

WORLD, SLOW_RANK, WARM_UP = 2, 1, 2
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({"dp": 2}, {"dp": 2, "dp_shares": (2, 1)}),
    "stages": ({"pp": 2, "stage_layers": (3, 3)}, {"pp": 2, "stage_layers": (4, 2)}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each way, that are timed (default 8)")
    asked = parser.parse_args()
    failed = False
    with Pool(preload=("torch", "shardwise.engine.engine")) as pool:
        for name, ways in PAIRS.items():
            jobs = [job_of(way) for way in ways]
            predicted = [candidate(job).step_seconds for job in jobs]
            found = pool.run(timed, WORLD, jobs, asked.steps, timeout_seconds=600)
            measured = [statistics.median(max(of_ranks) for of_ranks in zip(*way)) for way in zip(*found)]
            gain, expected = measured[0] / measured[1], predicted[0] / predicted[1]
            ok = gain > 1
            failed |= not ok
            print(f"{name}: equal {1e3 * measured[0]:.1f} ms a step, by speed {1e3 * measured[1]:.1f} ms")
            print(f"  faster {gain:.2f} times as measured, {expected:.2f} as predicted: {'ok' if ok else 'TOO SLOW'}")
    return 1 if failed else 0


def job_of(strategy: dict[str, Any]) -> Job:
    """6 layers on a quick device and one of half its speed, which is what computes: no cost of a step is fixed."""
    return Job.from_dict(
        {
            "model": {**resolve("model", Model, "tiny").to_dict(), "layers": 6},
            "cluster": {"kinds": [computing(1.0), computing(TIMES)]},
            "strategy": strategy,
            "training": {"global_batch": 12, "seq": 128, "precision": "fp32"},
        }
    )


def computing(slowness: float) -> Cluster:
    """A CPU whose steps are its arithmetic alone, as those of the timed layers are."""
    cluster = cluster_from("laptop:1")
    device = cluster.device
    peak = {kind: value / slowness for kind, value in device.peak.items()}
    efficiency = replace(device.efficiency, operator_seconds=0.0, step_seconds=0.0, stage_call_seconds=0.0)
    name = f"cpu-1/{slowness:g}"
    bandwidth = device.memory_bandwidth / slowness
    slower = replace(device, name=name, peak=peak, efficiency=efficiency, memory_bandwidth=bandwidth)
    return replace(cluster, name=name, device=slower)


def timed(place: PoolPlace, jobs: list[Job], steps: int) -> list[list[float]]:
    """Seconds of the steps of each job on this rank; they take turns, so that what else runs here slows all."""
    torch.set_num_threads(1)
    if place.rank == SLOW_RANK and not hasattr(Layer, "quick"):
        slow_down()
    with process_group(place.rank, place.world, place.rendezvous_file):
        engines = [Engine(job) for job in jobs]
        batches = [sample_batch(job, 0, 0).rows(engine.rows) for job, engine in zip(jobs, engines)]
        seconds: list[list[float]] = [[] for _ in jobs]
        for number in range(WARM_UP + steps):
            for engine, batch, own in zip(engines, batches, seconds):
                dist.barrier()
                start = time.perf_counter()
                engine.step(batch)
                if number >= WARM_UP:
                    own.append(time.perf_counter() - start)
        return seconds


if __name__ == "__main__":
    sys.exit(main())
