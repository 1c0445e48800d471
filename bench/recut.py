"""A pipeline with a rank of half the speed, cut again by `calibrate --from`: is it faster as measured, as it said?

    python bench/recut.py            # rank 0 of 2 at half speed, 12 layers
    python bench/recut.py --rank 1

Both cuts train with the same slow rank, one after the other on the same processes; the figure is the ratio of their
median steps. Exits 1 unless the new cut is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.launch.pool import Pool
from shardwise.launch.pool import WorkerPlace as PoolPlace
from shardwise.measure.compare.comparison import profiled_run
from shardwise.measure.recut import recut
from shardwise.models.layer import Layer
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.run.checkpoint.folder import CheckpointFolder, RunFolder
from shardwise.run.data.run_data import builtin_corpus, mixtures_of
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts
from shardwise.training.checkpointing import State
from shardwise.training.loop import Loop, LoopParts
from shardwise.training.profiler import Profiler

WORLD, TIMES = 2, 2.0
FIRST, LAST = 5, 8  # profiled
JOB: dict[str, Any] = {
    "model": "tiny",
    "cluster": f"laptop:{WORLD}",
    "strategy": {"pp": WORLD},
    "training": {"global_batch": 16, "seq": 128, "precision": "fp32"},
    "run": {
        "steps": 1000,
        "profile": {"first": FIRST, "last": LAST},
        "evaluation": {"batches": 0},
        "checkpoints": {"steps": None, "seconds": None},
        "logging": {"tensorboard": False, "memory": 10_000},
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=0, help="the slow one")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help="of each cut, that are timed (default 12)")
    asked = parser.parse_args()
    job = Job.from_dict(JOB)
    job = replace(job, model=replace(job.model, layers=asked.layers))
    with tempfile.TemporaryDirectory() as folder, Pool(preload=("torch", "shardwise.engine.engine")) as pool:

        def seconds(one: Job, name: str) -> float:
            path = Path(folder) / name
            path.mkdir()
            RunFolder(path).job.write_text(one.to_yaml(), encoding="utf-8")
            builtin_corpus(path)
            found = pool.run(timed, WORLD, one, str(path), asked.rank, asked.steps, timeout_seconds=600)
            steps: list[float] = [max(of_ranks) for of_ranks in zip(*found)]  # over when all ranks are done
            return statistics.median(steps)

        before = seconds(job, "before")
        profiled = profiled_run(str(Path(folder) / "before"))
        found = recut(profiled.job, profiled.measured)
        after = seconds(found.job, "after")
    cuts = [stage_layer_counts(one.model, one.strategy) for one in (job, found.job)]
    slowness = ", ".join(f"{one:.2f}" for one in found.slowness)
    print(f"rank {asked.rank} at 1/{TIMES:g} of the speed; a layer of the ranks, of the usual one's time: {slowness}")
    print(f"layers {cuts[0]}: {1e3 * before:.1f} ms a step; layers {cuts[1]}: {1e3 * after:.1f} ms")
    verdict = "ok" if after < before else "TOO SLOW"
    print(f"faster {before / after:.2f} times as measured, {found.gain:.2f} as expected: {verdict}")
    return 0 if verdict == "ok" else 1


def timed(place: PoolPlace, job: Job, folder: str, slow_rank: int, steps: int) -> list[float]:
    """Seconds of the steps after the profiled ones, on this rank."""
    torch.set_num_threads(1)
    if place.rank == slow_rank and not hasattr(Layer, "quick"):
        slow_down()
    with process_group(place.rank, place.world, place.rendezvous_file):
        path = Path(folder)
        engine = Engine(job)
        training, _ = mixtures_of(job, path)
        assert job.run.profile is not None
        profiler = Profiler(engine, job.run.profile, RunFolder(path).profile)
        reporter = Reporter(WorldPlace(place.rank, place.world, place.rank))
        checkpoints = CheckpointFolder(path / "checkpoints")
        parts = LoopParts(job, engine, training, None, checkpoints, reporter, None, profiler)
        loop = Loop(parts, State())
        loop.begin()
        seconds: list[float] = []
        for number in range(LAST + steps):
            dist.barrier()
            start = time.perf_counter()
            loop.advance()
            if number >= LAST:
                seconds.append(time.perf_counter() - start)
        loop.loader.close()
        return seconds


def slow_down() -> None:
    """Every pass of a layer takes as much of the processor once more."""
    quick: Callable[..., Any] = Layer.forward

    def slow(self: Layer, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        start, backward = time.thread_time(), list[float]()
        output = quick(self, _Mark.apply(hidden, backward, True), *others)  # type: ignore[no-untyped-call]
        _burn((TIMES - 1) * (time.thread_time() - start))
        marked: torch.Tensor = _Mark.apply(output, backward, False)  # type: ignore[no-untyped-call]
        return marked

    Layer.forward = slow  # type: ignore[method-assign, assignment]
    Layer.quick = quick  # type: ignore[attr-defined]


class _Mark(torch.autograd.Function):
    """Its backward pass comes before that of a layer, or ``after`` it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, started: list[float], after: bool) -> torch.Tensor:
        ctx.started, ctx.after = started, after
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.after:
            _burn((TIMES - 1) * (time.thread_time() - ctx.started.pop()))
        else:
            ctx.started.append(time.thread_time())
        return gradient, None, None


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


if __name__ == "__main__":
    sys.exit(main())
