"""The pool itself: new worlds on old processes, and who is blamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.workers import on_ranks, pool
from shardwise.launch.pool import RankLost, WorkerError, told_in_one_line

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def new_workers() -> None:
    """Else a worker may be replaced in the middle of a test, for the calls of tests before it."""
    pool().close()
    pool.cache_clear()


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


@pytest.mark.quick(1)
@pytest.mark.parametrize("dies", [False, True])
def test_the_first_rank_that_failed_is_named(dies: bool) -> None:
    with pytest.raises(WorkerError) as raised:
        on_ranks(3, failing, 1, dies)
    assert raised.value.rank == 1
    assert ("the process ended" if dies else "this one") in raised.value.reason
    assert [total for _, total in on_ranks(3, summed, 1.0)] == [6.0] * 3


@pytest.mark.parametrize("dies", [False, True])
def test_a_verb_tells_it_in_one_line_with_status_1(dies: bool) -> None:
    with pytest.raises(RankLost) as raised, told_in_one_line("run it again"):
        on_ranks(2, failing, 1, dies)
    why = "the process ended" if dies else "ValueError: this one"
    assert str(raised.value) == f"rank 1: was lost ('{why}'); run it again" and raised.value.status == 1


class Ring:
    """Holds a process group in a cycle, as models with hooks do."""

    def __init__(self) -> None:
        self.group, self.itself = dist.new_group(), self


def threads_after_a_ring() -> int:
    Ring()
    return len(list(TASKS.iterdir()))


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads as Linux shows them")
def test_process_groups_of_earlier_calls_are_gone() -> None:
    """Each has threads that wake up a hundred times a second: a hundred layouts later nothing else would run."""
    on_ranks(2, threads_after_a_ring)
    first = on_ranks(2, threads_after_a_ring)
    for _ in range(3):
        last = on_ranks(2, threads_after_a_ring)
    assert last == first


def doubled_and_gathered(groups_before: int) -> list[float]:
    """With other groups made first, the mesh's own have other names."""
    for _ in range(groups_before):
        dist.new_group()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copies", "parts"))["parts"]
    divided = DTensor.from_local(torch.tensor([1.0 + dist.get_rank() % 2]), mesh, [Shard(0)])
    gathered: list[float] = (divided + divided).full_tensor().tolist()
    return gathered


def test_a_world_remembers_nothing_of_the_one_before() -> None:
    """PyTorch keeps what it has found out about a DTensor, mesh included; an equal mesh has its groups elsewhere."""
    assert on_ranks(4, doubled_and_gathered, 3) == [[2.0, 4.0]] * 4
    assert on_ranks(4, doubled_and_gathered, 0) == [[2.0, 4.0]] * 4
