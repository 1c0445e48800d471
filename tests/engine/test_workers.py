"""The pool itself: new worlds on old processes, and who is blamed."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from engine.workers import on_ranks
from shardwise.launch.pool import WorkerError


def summed(value: float) -> tuple[int, float]:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def failing(culprit: int, dies: bool) -> None:
    if dist.get_rank() == culprit:
        if dies:
            os._exit(3)
        raise ValueError("this one")
    dist.barrier()


def test_every_call_is_a_new_world_on_the_same_processes() -> None:
    four, two = on_ranks(4, summed, 1.0), on_ranks(2, summed, 2.0)
    assert [total for _, total in four] == [10.0] * 4 and [total for _, total in two] == [6.0] * 2
    assert [pid for pid, _ in four][:2] == [pid for pid, _ in two]


@pytest.mark.parametrize("dies", [False, True])
def test_the_first_rank_that_failed_is_named(dies: bool) -> None:
    with pytest.raises(WorkerError) as raised:
        on_ranks(3, failing, 1, dies)
    assert raised.value.rank == 1
    assert ("the process ended" if dies else "this one") in raised.value.reason
    assert [total for _, total in on_ranks(3, summed, 1.0)] == [6.0] * 3
