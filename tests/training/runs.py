"""Small runs for tests: a job, its data, and the loop on processes of the pool."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.trainer import Trainer
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.data.run_data import mixtures_of
from shardwise.run.data.token_files import PairWriter
from shardwise.run.metrics.lines import read_lines
from shardwise.run.metrics.recorder import Recorder
from shardwise.spec import Job
from shardwise.training.checkpoint.state import state_tensors
from shardwise.training.checkpointing import State, load_newest
from shardwise.training.loop import Loop, LoopParts
from shardwise.training.profiler import Profiler

VOCAB = 512


def write_shards(prefix: Path, documents: int = 60, seed: int = 0) -> str:
    """Documents of which each repeats a few tokens: there is something to learn."""
    random = np.random.default_rng(seed)
    with PairWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            words = random.integers(0, VOCAB, 5)
            writer.add(words[random.integers(0, 5, int(random.integers(40, 200)))])
    return str(prefix)


def write_answers(prefix: Path, documents: int = 60, seed: int = 0) -> str:
    """Documents like those of `write_shards` of which the loss counts an end, as after a prompt: short or long."""
    random = np.random.default_rng(seed)
    with PairWriter(prefix, np.uint16, masked=True) as writer:
        for _ in range(documents):
            words, length = random.integers(0, VOCAB, 5), int(random.integers(3, 90))
            asked = int(random.integers(1, length))
            writer.add(words[random.integers(0, 5, length)], np.arange(length) >= asked)
    return str(prefix)


def job_of(shards: str, devices: int = 1, *, run: dict[str, Any] | None = None, **strategy: Any) -> Job:
    # A large epsilon: where a gradient is nearly zero, Adam would make rounding a whole step.
    moves = {"learning_rate": 1e-3, "epsilon": 1e-4}
    return Job.from_dict(
        {
            "model": "tiny",
            "cluster": f"laptop:{devices}",
            "strategy": strategy,
            "training": {"global_batch": 8, "seq": 32, "precision": "fp32", "optimization": moves},
            "run": {"data": {"shards": [shards], "held_out": 0.2}, "logging": {"tensorboard": False}, **(run or {})},
        }
    )


class Spoilt(Engine):
    """An engine whose batches of some numbers give this rank gradients that are not finite, or a large loss."""

    def __init__(self, job: Job, *, nan_at: Sequence[str] = (), large_at: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(job, **settings)
        self.nan_at, self.large_at = set(nan_at), set(large_at)

    def forward_backward(self, batch: Any) -> Any:
        loss = super().forward_backward(batch)
        name = digest(batch.tokens.numpy())
        if name in self.nan_at:
            parameter = next(one for one in self.parameters if one.gradient is not None)
            assert parameter.gradient is not None
            parameter.gradient.view(-1)[0] = float("nan")
        return loss * 100 if name in self.large_at else loss


def digest(tokens: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may be longer than a short text, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train_with_a_full_disk(job: Job, folder: str) -> dict[str, Any]:
    """The last rank cannot write its part of a checkpoint."""
    import torch.distributed as dist

    with full_disk() if dist.get_rank() == dist.get_world_size() - 1 else nullcontext():
        return train(job, folder)


def train(job: Job, folder: str, spoilt: dict[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """One rank of a run, from its newest checkpoint on; where it ended, its tensors, the batches it has seen."""
    import torch.distributed as dist

    engine: Trainer[Any] = Spoilt(job, seed=job.run.seed, **(spoilt or {}))  # type: ignore[arg-type]
    checkpoints = CheckpointFolder(Path(folder) / "checkpoints")
    state = load_newest(engine, checkpoints) or State()
    rank, world = dist.get_rank(), dist.get_world_size()
    training, validation = mixtures_of(job, Path(folder))
    recorder = Recorder(job, Path(folder), state.position.step) if rank == 0 else None
    reporter = Reporter(WorldPlace(rank, world, rank))
    profiler = None if job.run.profile is None else Profiler(engine, job.run.profile, Path(folder) / "profile")
    loop = Loop(LoopParts(job, engine, training, validation, checkpoints, reporter, recorder, profiler), state)
    seen: list[tuple[int, int, Any]] = []
    take = loop.loader.take

    def noting(number: int) -> Any:
        rows = take(number)
        seen.append((number, loop.trainer.rows.start, rows.tokens))
        return rows

    loop.loader.take = noting  # type: ignore[method-assign]
    end = loop.run()
    return {"end": end, "boxes": boxes(engine), "seen": seen}


def boxes(engine: Trainer[Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    return [
        (one.key, one.shape, place.box.start, one.read()[place.local].detach().float().numpy().copy())
        for one in state_tensors(engine)
        for place in one.places
    ]


def whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The tensors of the whole model out of the boxes of all ranks; copies must agree."""
    found: dict[str, Any] = {}
    for result in results:
        for key, shape, start, value in result["boxes"]:
            target = found.setdefault(key, np.full(shape, np.nan, np.float32))
            place = target[tuple(slice(a, a + n) for a, n in zip(start, value.shape))]
            assert np.isnan(place).all() or np.array_equal(place, value)
            place[...] = value
    assert not any(np.isnan(tensor).any() for tensor in found.values())
    return found


def run(job: Job, folder: Path, spoilt: dict[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
    """All ranks of a run."""
    folder.mkdir(exist_ok=True)
    return on_ranks(job.cluster.devices, train, job, str(folder), spoilt)


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "metrics.jsonl"))


def global_batches(results: list[dict[str, Any]]) -> dict[int, str]:
    """A hash of every global batch that the ranks of a run have seen, whole sequences in their order."""
    parts: dict[int, dict[int, Any]] = {}
    for result in results:
        for number, rank, tokens in result["seen"]:
            parts.setdefault(number, {})[rank] = tokens
    return {number: digest(np.concatenate([of[rank] for rank in sorted(of)])) for number, of in parts.items()}
