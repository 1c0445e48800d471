"""Processes that are killed, stopped or fail at any point: nothing that was committed is lost, and the run ends as if
nothing had been, bit for bit."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.diagnosis import SILENT_SECONDS
from training.faults import final_state, small_job, train
from training.faulty_worker import Fault
from training.runs import run as run_in_pool
from training.runs import write_shards

LIMIT_SECONDS = 10  # after which a rank without a sign of life has failed


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: str) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_in_pool(small_job(shards), folder)
    return final_state(folder)


def test_one_run_survives_what_may_happen_to_its_processes(
    tmp_path: Path, shards: str, undisturbed: tuple[Any, ...]
) -> None:
    """Both ranks, in a step and before the commit: killed, stopped, failed; one restart after the other."""
    faults = [
        Fault("stop", "backward", 3, rank=1, attempt=1),  # has step 2
        Fault("kill", "sealed", 4, rank=0, attempt=2),
        Fault("raise", "backward", 7, rank=1, attempt=3),  # has step 6
    ]
    patient = {"restarts": 2, "timeouts": {"start": 100, "step": LIMIT_SECONDS, "checkpoint": 60}}
    ended = train(small_job(shards, run=patient), tmp_path / "run", *faults)
    ended.require(
        0,
        "rank 1 (step, step 3): no sign of life for",
        "rank 1 (step, step 7): ArithmeticError: the moon is full; ",  # and perhaps who waits for it
        "; restart 1 of 2 from step 6",
    )
    assert re.search(r"rank 0 \(\w+, step [456]\): killed by SIGKILL; restart 2 of 2 from step 2", ended.said)
    silent = re.search(r"no sign of life for ([\d.]+) s: stopped, or in a call", ended.said)
    assert silent
    assert SILENT_SECONDS < float(silent[1]) < 2 * LIMIT_SECONDS
    ended.require_whole()
    assert final_state(ended.folder) == undisturbed


POINTS = [("begin", 3), ("backward", 3), ("writing", 4), ("written", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "strategy"), [(2, {"dp": 2, "zero": 3}), (4, {"tp": 2, "pp": 2}), (4, {"dp": 4, "zero": 1})], ids=str
)
def test_a_kill_of_any_rank_at_any_point(tmp_path: Path, shards: str, devices: int, strategy: dict[str, Any]) -> None:
    """The rank goes round with the point, so that each rank dies, and each point comes, in one run."""
    rounds = [(*POINTS[number % 4], (number + number // 4) % devices) for number in range(8)]
    rounds += [("sealed", 4, 0), ("committed", 4, 0)]  # before the last of them nothing but step 2 is committed
    faults = [Fault("kill", at, step, rank, attempt) for attempt, (at, step, rank) in enumerate(rounds, 1)]
    job = small_job(shards, devices, run={"restarts": 20}, **strategy)
    ended = train(job, tmp_path / "run", *faults)
    ended.require(0)
    assert ended.said.count("killed by SIGKILL; restart") == len(faults), ended.said
    ended.require_whole()
    whole = train(job, tmp_path / "whole")
    whole.require(0)
    assert final_state(ended.folder) == final_state(whole.folder)


@pytest.mark.slow
def test_different_collectives_are_explained_and_a_second_run_is_kept_out(
    tmp_path: Path, shards: str, undisturbed: tuple[Any, ...]
) -> None:
    """In debug mode, which changes no bit either."""
    faults = [Fault("differ", "backward", 3, rank=1, attempt=1), Fault("second", "begin", 3, rank=0, attempt=2)]
    ended = train(small_job(shards), tmp_path / "run", *faults, arguments=("--debug",))
    ended.require(0, "different collectives", "calls broadcast of Float [3]", "restart 1 of 3 from step 2")
    (log,) = ended.folder.glob("attempts/attempt-0002/rank-0.log")
    assert (
        f"exit 2: shardwise: error: {ended.checkpoints.path}: process {os.getpid()} is training in it"
        in log.read_text()
    )
    ended.require_whole()
    assert final_state(ended.folder) == undisturbed
