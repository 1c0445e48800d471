"""A rank that is slow in every step is named while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardwise.launch.observe.state import RunObserver
from shardwise.run.checkpoint.folder import RunFolder
from training.faults import small_job, train
from training.faulty_worker import Fault
from training.runs import write_shards


@pytest.mark.slow
def test_a_slow_rank_is_named_while_the_run_goes_on(tmp_path: Path) -> None:
    """Rank 1 sleeps in every step; the run takes longer than the time between two records."""
    settings = {"steps": 120, "checkpoints": {"steps": None, "seconds": None}}
    job = small_job(write_shards(tmp_path / "words"), 2, run=settings, dp=2, zero=0)
    folder = RunFolder(tmp_path / "run")
    seen: list[tuple[int, ...]] = []
    done = threading.Event()

    def watch() -> None:
        observer = RunObserver(folder)
        while not done.wait(0.5):
            seen.append(tuple(one.rank for one in observer.state().stragglers))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        train(job, folder.path, Fault("slow", "backward", 1, rank=1)).require(0)
    finally:
        done.set()
        thread.join()
    assert (1,) in seen
    assert not any(0 in one for one in seen)
