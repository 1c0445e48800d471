"""Profiled runs on processes of the pool, with a rank whose layers take longer or messages that come late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from engine.workers import on_ranks
from shardwise.launch.pool import WorkerPlace
from shardwise.spec import Job
from training.runs import job_of

FIRST, LAST = 4, 6
RUN = {
    "steps": LAST + 1,
    "profile": {"first": FIRST, "last": LAST},
    "evaluation": {"batches": 0},
    "schedule": {"kind": "constant"},
    "checkpoints": {"steps": None, "seconds": None},
    "logging": {"tensorboard": False, "memory": 1000},
}


def profiled_job(shards: str, devices: int, *, layers: int = 4, emulate: str | None = None, **strategy: Any) -> Job:
    job = job_of(shards, devices, run={**RUN, **({"emulate": emulate} if emulate else {})}, **strategy)
    return replace(job, model=replace(job.model, layers=layers))


def run_profiled(
    job: Job,
    folder: Path,
    *,
    slow_rank: int | None = None,
    times: float = 2.0,
    late_pair: tuple[int, int] | None = None,
    late_seconds: float = 0.0,
) -> None:
    """Leaves a run's folder as `shardwise train --profile` does."""
    prepared(job, folder)
    on_ranks(job.cluster.devices, _one_rank, job, str(folder), slow_rank, times, late_pair, late_seconds)


def prepared(job: Job, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(job.to_yaml(), encoding="utf-8")


def run_across(job: Job, folder: Path, delay_seconds: float, pair: tuple[int, int]) -> None:
    """The same on the virtual nodes that the job names, of which one pair has a longer way."""
    from engine.workers import PRELOAD
    from shardwise.launch.emulate.network import EmulatedPool

    assert job.run.emulate is not None
    prepared(job, folder)
    with EmulatedPool(job.run.emulate, PRELOAD) as pool:
        pool.network.reshape(delay=delay_seconds, pair=pair)
        pool.run(_in_world, job.cluster.devices, job, str(folder))


def _in_world(place: WorkerPlace, job: Job, folder: str) -> None:
    import torch

    from shardwise.engine.mesh import process_group
    from training.runs import train

    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        train(job, folder)


def _one_rank(
    job: Job, folder: str, slow_rank: int | None, times: float, late_pair: tuple[int, int] | None, seconds: float
) -> None:
    import torch.distributed as dist

    from training.runs import train

    rank = dist.get_rank()
    with ExitStack() as slowed:
        if rank == slow_rank:
            slowed.enter_context(slow_layers(times))
        if late_pair is not None and rank in late_pair:
            slowed.enter_context(late_messages(seconds))
        train(job, folder)


@contextmanager
def slow_layers(times: float) -> Iterator[None]:
    """Every pass of every layer takes this many times as much of the processor, whoever else wants it."""
    import torch

    from shardwise.models.layer import Layer

    forward = Layer.forward

    class Mark(torch.autograd.Function):
        """Its backward pass comes before or after that of the layer."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, began: list[float], after: bool) -> Any:
            ctx.began, ctx.after = began, after
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if ctx.after:
                burn((times - 1) * (time.thread_time() - ctx.began.pop()))
            else:
                ctx.began.append(time.thread_time())
            return gradient, None, None

    def slow(self: Any, hidden: Any, *arguments: Any) -> Any:
        began, passes = time.thread_time(), []
        output = forward(self, Mark.apply(hidden, passes, True), *arguments)
        burn((times - 1) * (time.thread_time() - began))
        return Mark.apply(output, passes, False)

    with mock.patch.object(Layer, "forward", slow):
        yield


def burn(seconds: float) -> None:
    """Of this thread's time on a processor: a loaded machine slows it as it slows the layer."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def late_messages(seconds: float) -> Iterator[None]:
    """What another stage sends arrives this much later."""
    from shardwise.engine.pipeline.runtime import Mailbox

    receive = Mailbox.receive

    def late(self: Any, rank: int, what: str) -> Any:
        arrival = receive(self, rank, what)
        return replace(arrival, work=_Late(arrival.work, seconds))

    with mock.patch.object(Mailbox, "receive", late):
        yield


class _Late:
    def __init__(self, work: Any, seconds: float) -> None:
        self.work, self.seconds = work, seconds

    def wait(self) -> None:
        self.work.wait()
        time.sleep(self.seconds)
