"""What offload saves of a rank's memory, and what it costs in time: planned beside measured, on one process.

    PYTHONPATH=src python bench/offload.py

Every case trains the same decoder; the peak is of the bytes in torch tensors. The saving is compared with the plan's,
the time of a step with that of the case that offloads nothing; the medians of steps that alternate between the cases.
Exits 1 where a measured saving is more than a tenth off the planned one, or weights differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.cost.memory.device import memory_of_rank
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload.store import MASTER
from shardwise.engine.parameters import local
from shardwise.measure.reference import sample_batch
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.training.memory import TensorBytes

MODEL = {"name": "bench", "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "vocab": 512}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer to disk": {"optimizer": 1, "target": "nvme"},
    "half the activations to disk": {"activations": 0.5, "target": "nvme"},
    "activations to disk": {"activations": 1, "target": "nvme"},
    "both to disk": {"optimizer": 1, "activations": 1, "target": "nvme"},
    "optimizer, weights, gradients to disk": {"optimizer": 1, "weights": 1, "gradients": 1, "target": "nvme"},
}
OFF = 0.1  # of the planned saving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, str(Path(folder) / "meeting")):
        return compare(steps)


def compare(steps: int) -> int:
    jobs = {name: _job(offload) for name, offload in CASES.items()}
    engines = {name: Engine(one) for name, one in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for step in range(steps):
        for name, engine in engines.items():
            batch = sample_batch(engine.job, step, 0)
            start = time.perf_counter()
            engine.step(batch)
            seconds[name].append(time.perf_counter() - start)
    peaks = {name: _peak(engine) for name, engine in engines.items()}
    failed = False
    print(f"{'offloaded':38} {'planned':>10} {'measured':>10} {'saved, planned':>15} {'measured':>10} {'time':>7}")
    for name, one in jobs.items():
        planned, plain = (_planned(which) for which in (one, jobs["nothing"]))
        saved = peaks["nothing"] - peaks[name]
        ratio = statistics.median(seconds[name]) / statistics.median(seconds["nothing"])
        figures = [readable_bytes(figure) for figure in (planned, peaks[name], plain - planned, saved)]
        print(f"{name:38} {figures[0]:>10} {figures[1]:>10} {figures[2]:>15} {figures[3]:>10} {ratio:6.2f}×")
        failed |= abs(saved - (plain - planned)) > OFF * (plain - planned) or not _equal(
            engines[name], engines["nothing"]
        )
    return int(failed)


def _job(offload: dict[str, Any]) -> Job:
    training = {"global_batch": 8, "seq": 256, "precision": "fp32"}
    # On one process ZeRO-3 divides nothing, but lets weights and gradients go.
    strategy = {"microbatch": 8, "zero": 3 if offload.get("weights") else 0, "offload": offload}
    return Job.from_dict({"model": MODEL, "cluster": "laptop:1", "strategy": strategy, "training": training})


def _planned(one: Job) -> float:
    memory = memory_of_rank(one, 0)
    return memory.total - memory.allowance


def _peak(engine: Engine) -> int:
    with TensorBytes() as memory:
        memory.watch(local(held.parameter) for held in engine.parameters)
        memory.watch(local(state) for states in engine.optimizer.state.values() for state in states.values())
        memory.reset_peak()
        engine.step(sample_batch(engine.job, 0, 0))
    return memory.peak


def _equal(one: Engine, other: Engine) -> bool:
    def weights(engine: Engine) -> list[torch.Tensor]:
        return [engine.optimizer.read(held.parameter, MASTER) for held in engine.parameters]

    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(weights(one), weights(other), strict=True))


if __name__ == "__main__":
    sys.exit(main())
