"""How much communication slows concurrent computation: on a CPU both run on the same cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.world import joined
from shardwise.measure.calibrate.ranks import Rank
from shardwise.measure.calibrate.timing import undisturbed

ROUNDS, ELEMENTS = 7, 2**20


def measure_overlap(rank: Rank, device: str, threads: int) -> float:
    """The share of an overlapped all-reduce's time that it adds to concurrent matmuls; 1: nothing is hidden."""
    torch.set_num_threads(threads)
    with joined(rank.number, rank.world, rank.store, device=device):
        world = dist.group.WORLD
        assert world is not None
        gradient = torch.ones(ELEMENTS, device=device)
        side = torch.randn(256 if device == "cpu" else 4096, 256 if device == "cpu" else 4096, device=device)

        def send() -> None:
            all_reduce_sum(gradient, world)

        sending = _seconds(send, device)
        repeats = max(1, round(sending / _seconds(lambda: side @ side, device)))

        def compute() -> None:
            for _ in range(repeats):
                side @ side

        def both() -> None:
            pending = all_reduce_sum(gradient, world, async_op=True)
            compute()
            if pending is not None:
                pending.wait()

        sending, computing, together = (_seconds(call, device) for call in (send, compute, both))
        hidden = min(sending, computing)
        return min(1.0, max(0.0, (together - max(sending, computing)) / hidden))


def _seconds(call: Callable[[], Any], device: str) -> float:
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return undisturbed(found)
