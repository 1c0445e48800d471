"""What the training loop adds to the engine's bare step, on two gloo processes.

    PYTHONPATH=src python bench/loop.py

The bare step finds its batch in memory; the loop loads it, sets the learning rate, reads figures, judges them, writes
metrics, reports to the launcher, agrees with the other rank and collects garbage. Their steps alternate on one engine;
a step lasts as long as its slowest rank, and the medians are compared. Exits 1 where the loop adds more than it may.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.launch.pool import Pool
from shardwise.launch.pool import WorkerPlace as PoolPlace
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.data.order import rows_of
from shardwise.run.data.run_data import builtin_corpus, mixtures_of
from shardwise.run.metrics.recorder import Recorder
from shardwise.spec.job import Job
from shardwise.training.checkpointing import State
from shardwise.training.loop import Loop, LoopParts, batch_of

WORLD = 2
WARM_UP = 5
MOST_OVERHEAD = 0.03
JOB = {
    "model": {"layers": 6, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512, "max_seq": 256},
    "cluster": f"laptop:{WORLD}",
    "strategy": {"dp": WORLD, "zero": 1, "microbatch": 2},
    "training": {"global_batch": 4, "seq": 256, "precision": "fp32"},
    "run": {"steps": 10**6, "evaluation": {"batches": 0}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder, Pool(preload=("torch", "torch.distributed.fsdp")) as pool:
        builtin_corpus(Path(folder))
        found = pool.run(timed, WORLD, folder, steps)
    bare, loop = (statistics.median(max(ranks) for ranks in zip(*(one[side] for one in found))) for side in (0, 1))
    overhead = loop / bare - 1
    verdict = "ok" if overhead <= MOST_OVERHEAD else "MISSED"
    print(
        f"a step of the loop: {1e3 * loop:.1f} ms, the engine's bare step: {1e3 * bare:.1f} ms; "
        f"{overhead:+.1%} (at most {MOST_OVERHEAD:.0%}): {verdict}"
    )
    return 0 if verdict == "ok" else 1


def timed(place: PoolPlace, folder: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each bare step and of each step of the loop on this rank."""
    torch.set_num_threads(1)
    job, run_folder = Job.from_dict(JOB), Path(folder)
    with process_group(place.rank, place.world, place.rendezvous_file):
        engine = Engine(job)
        training, _ = mixtures_of(job, run_folder)
        reporter = Reporter(WorldPlace(place.rank, place.world, place.rank, folder=run_folder))
        recorder = Recorder(job, run_folder, 0) if place.rank == 0 else None
        checkpoints = CheckpointFolder(run_folder / "checkpoints")
        loop = Loop(LoopParts(job, engine, training, None, checkpoints, reporter, recorder), State())
        batches = [
            batch_of(rows_of(training, number, job.sequences, engine.rows), engine.device)
            for number in range(WARM_UP + steps)
        ]
        seconds: tuple[list[float], list[float]] = ([], [])
        gc.disable()
        loop.begin()
        for number in range(WARM_UP + steps):
            # Who goes first changes, since what runs after the other finds its caches cold.
            for side in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                start = time.perf_counter()
                if side:
                    loop.advance()
                else:
                    engine.step(batches[number])
                if number >= WARM_UP:
                    seconds[side].append(time.perf_counter() - start)
        gc.enable()
        loop.loader.close()
        return seconds


if __name__ == "__main__":
    sys.exit(main())
