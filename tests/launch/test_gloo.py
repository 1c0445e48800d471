"""The launcher with a real process group: its victims, a rank that spins, and collectives that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.running import PREFACE, launch
from launch.warm import warm_ranks
from shardwise.spec.run import Timeouts

GROUP = (
    PREFACE
    + """
import torch
import torch.distributed as dist
from datetime import timedelta

def train():
    store = dist.FileStore(str(place.rendezvous), place.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=place.world, timeout=timedelta(seconds=60))
    for step in range(3):
        reporter.phase("step", step, limit_seconds=None if step == 2 else 60)
        if step == 2:
            fault()
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()  # else threads of gloo now and then abort the interpreter at its end

def main():
    try:
        train()
    except BaseException as error:
        reporter.failed(error)
        raise

"""
)
RUN = "\nmain()\n"


def test_the_first_rank_is_named_not_those_whose_connections_broke(tmp_path: Path) -> None:
    body = """
def fault():
    if rank == 1 and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    with warm_ranks():
        found = launch(tmp_path, body + RUN, world=3, restarts=1, preface=GROUP)
    assert str(found.attempts[0].failure) == "rank 1 (step, step 2): killed by SIGKILL"
    assert found.status == 0, found.failure  # the second attempt met in a file of its own
    complaints = list(found.attempts[0].folder.glob("rank-*.failed.json"))
    assert complaints, "there were no victims to choose from"


@pytest.mark.slow
def test_a_rank_that_spins_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    body = """
def fault():
    while rank == 0:
        pass
"""
    timeouts = Timeouts(start=100, step=6, checkpoint=100)
    with warm_ranks():
        found = launch(tmp_path, body + RUN, preface=GROUP, timeouts=timeouts)
    failure = found.failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.step) == (0, "stuck", 2)
    assert "in fault" in failure.reason


@pytest.mark.slow
def test_collectives_that_differ_are_explained(tmp_path: Path) -> None:
    body = """
def fault():
    if rank == 1:
        dist.broadcast(torch.ones(8), 0)
"""
    found = launch(tmp_path, body + RUN, preface=GROUP, debug=True)
    assert found.failure is not None
    told = "rank 0 calls allreduce of Float [4], rank 1 calls broadcast of Float [8]"
    assert str(found.failure) == f"the ranks (step, step 2): different collectives (number 2): {told}"
