"""The loop on real processes: the same run in one go, in pieces, on other layouts; and steps that go wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from engine.workers import on_ranks
from shardwise.engine.optim.one_pass import REFUSED
from shardwise.launch.pool import WorkerError
from shardwise.run.data.order import rows_of
from shardwise.run.data.run_data import mixtures_of
from shardwise.spec import Job
from training.runs import digest, global_batches, job_of, lines, run, train_with_a_full_disk, whole, write_shards

SHORT: dict[str, Any] = {"steps": 6, "evaluation": {"interval": 3, "batches": 1}, "checkpoints": {"steps": 3}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


def stopped_after(job: Job, steps: int) -> Job:
    """The first part of a run."""
    return replace(job, run=replace(job.run, stop_at=steps))


def losses(folder: Path) -> list[float]:
    return [one["loss"] for one in lines(folder) if "loss" in one]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_run_in_two_pieces_is_the_run_in_one(tmp_path: Path, shards: str) -> None:
    """Bit for bit, weights and Adam's moments, in every figure and batch; with another layout to rounding."""
    steady = {**SHORT, "schedule": {"kind": "cosine", "warmup": 2}}
    job = job_of(shards, 2, run=steady, dp=2, zero=1)
    at_once = run(job, tmp_path / "a")
    first = run(stopped_after(job, 3), tmp_path / "b")
    others = ((1, {}), (4, {"tp": 2, "pp": 2}))
    for devices, _ in others:
        shutil.copytree(tmp_path / "b", tmp_path / str(devices))
    second = run(job, tmp_path / "b")
    assert equal(whole(at_once), whole(second))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert [one["step"] for one in lines(tmp_path / "b") if "loss" in one] == [1, 2, 3, 4, 5, 6]
    evaluated = [{one["step"]: one["validation_loss"] for one in lines(tmp_path / name) if "validation_loss" in one}
                 for name in "ab"]  # fmt: skip
    assert evaluated[0].keys() == {0, 3, 6}
    assert evaluated[0] == evaluated[1]
    assert evaluated[0][6] < evaluated[0][0]
    batches = global_batches(at_once)
    assert {**global_batches(first), **global_batches(second)} == batches
    for devices, strategy in others:
        other, folder = job_of(shards, devices, run=steady, **strategy), tmp_path / str(devices)
        resumed = run(other, folder)
        assert global_batches(resumed) == global_batches(second)
        assert np.allclose(losses(folder), losses(tmp_path / "a"), rtol=1e-5)
        found, wanted = whole(resumed), whole(at_once)
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            assert np.abs(tensor - wanted[key]).max() <= 1e-5 * max(np.abs(wanted[key]).max(), 1e-3), key


def spoilt_batch(job: Job, folder: Path, number: int) -> str:
    """The share of the last data-parallel rank in a global batch, by its hash."""
    training, _ = mixtures_of(job, folder)
    ranks = job.strategy.data_parallel
    return digest(rows_of(training, number, job.sequences, job.rows_of(ranks - 1)).tokens)


@pytest.mark.parametrize("strategy", [{"dp": 2}, pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.slow)], ids=str)
def test_a_rank_with_gradients_that_are_not_finite_stops_all_from_moving(
    tmp_path: Path, shards: str, strategy: dict[str, Any]
) -> None:
    """One rank's NaN leaves the step out on both: as if that batch had not been, but for the schedule."""
    steady = {"steps": 4, "schedule": {"kind": "constant"}, "evaluation": {"batches": 0}, "checkpoints": {"steps": 2}}
    job = job_of(shards, 2, run=steady, **strategy)
    bad = {"nan_at": [spoilt_batch(job, tmp_path, 2)]}
    run(job, tmp_path / "a", bad)
    found = {one["step"]: one for one in lines(tmp_path / "a") if "loss" in one}
    assert [step for step, one in found.items() if one.get("bad") == "left out"] == [3]
    assert found[3]["gradient_norm"] is None
    assert found[3]["loss"] is not None
    good = losses(tmp_path / "a")
    rolled = job_of(shards, 2, run={**steady, "non_finite": {"policy": "roll-back"}}, **strategy)
    results = run(rolled, tmp_path / "b", bad)
    assert results[0]["end"].left_out == {2}
    assert results[0]["end"].batch == 5
    seen = [number for number, _, _ in results[1]["seen"]]
    assert seen == [0, 1, 2, 3, 3, 4]  # back to step 2; the step after the bad one was under way when it was noticed
    assert losses(tmp_path / "b")[:2] == good[:2]
    assert [one["step"] for one in lines(tmp_path / "b") if "loss" in one] == [1, 2, 3, 4]


def test_a_run_stops_by_policy_and_keeps_what_it_has(tmp_path: Path, shards: str) -> None:
    job = job_of(shards, 2, run={**SHORT, "non_finite": {"policy": "stop"}}, dp=2)
    bad = {"nan_at": [spoilt_batch(job, tmp_path, 1)]}
    with pytest.raises(WorkerError, match="stop: step 2: its gradients are not finite"):
        run(job, tmp_path / "a", bad)
    assert (tmp_path / "a" / "checkpoints" / "step-00000003").is_dir()
    limited = job_of(shards, 1, run={**SHORT, "non_finite": {"in_a_row": 1}})
    every = {"nan_at": [spoilt_batch(limited, tmp_path, number) for number in range(3)]}
    with pytest.raises(WorkerError, match="as in the 1 bad steps before it"):
        run(limited, tmp_path / "b", every)


@pytest.mark.slow
def test_a_loss_that_jumps_is_left_out(tmp_path: Path, shards: str) -> None:
    job = job_of(shards, 2, run={**SHORT, "steps": 12, "spikes": {"factor": 2}}, dp=2)
    run(job, tmp_path / "a", {"large_at": [spoilt_batch(job, tmp_path, 10)]})
    bad = [one for one in lines(tmp_path / "a") if one.get("bad")]
    assert [one["step"] for one in bad] == [11]
    assert bad[0]["gradient_norm"] is None
    assert -np.inf == REFUSED


@pytest.mark.slow
def test_memory_of_every_rank_is_recorded_once(tmp_path: Path, shards: str) -> None:
    job = job_of(shards, 2, run=SHORT, dp=2)
    run(job, tmp_path)
    (counted,) = (one for one in lines(tmp_path) if "memory_bytes" in one)
    assert counted["step"] == 3
    least = 4 * 4 * 262_720  # fp32 weights, gradients and two moments
    assert all(least < peak < 4 * least for peak in counted["memory_bytes_of_ranks"])
    assert counted["memory_bytes"] == max(counted["memory_bytes_of_ranks"])


@pytest.mark.slow
def test_a_checkpoint_that_is_due_by_the_clock_is_begun_by_all_ranks(tmp_path: Path, shards: str) -> None:
    often = {"steps": 8, "evaluation": {"batches": 0}, "checkpoints": {"seconds": 0.001, "keep": 1}}
    run(job_of(shards, 2, run=often, dp=2), tmp_path)
    saved = [one["checkpoint"] for one in lines(tmp_path) if "checkpoint" in one]
    assert saved[0] < 8
    assert saved[-1] == 8
    assert len(set(saved)) == len(saved)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


@pytest.mark.slow
def test_a_full_disk_of_one_rank_leaves_the_last_good_checkpoint(tmp_path: Path, shards: str) -> None:
    """Training goes on, or stops, by policy; it is never called done without its last checkpoint."""
    settings = {"steps": 8, "evaluation": {"batches": 0}, "checkpoints": {"steps": 2}}
    run(job_of(shards, 2, run={**settings, "stop_at": 2}, dp=2), tmp_path)
    with pytest.raises(WorkerError, match="step-00000008: could not be written, so the run is not done"):
        on_ranks(2, train_with_a_full_disk, job_of(shards, 2, run=settings, dp=2), str(tmp_path))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert [one["step"] for one in lines(tmp_path) if "loss" in one] == list(range(1, 9))
    failed = [one for one in lines(tmp_path) if "checkpoint_failed" in one]
    assert all("rank 1 could not write" in one["checkpoint_failed"] for one in failed)
    assert [one["checkpoint_failed_step"] for one in failed] == [4, 6, 8]  # whenever that was noticed
    stops = {**settings, "checkpoints": {"steps": 2, "disk_full": "stop", "asynchronous": False}}
    with pytest.raises(WorkerError, match="step-00000004: rank 1 could not write its part: File too large"):
        on_ranks(2, train_with_a_full_disk, job_of(shards, 2, run=stops, dp=2), str(tmp_path))
    run(job_of(shards, 2, run=settings, dp=2), tmp_path)  # there is room again
    assert (tmp_path / "checkpoints" / "step-00000008").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp8", marks=pytest.mark.slow), "fp8-delayed"])
def test_a_run_in_fp8_resumes_where_it_stopped_and_goes_on_in_bf16(
    precision: Literal["fp8", "fp8-delayed"], tmp_path: Path, shards: str
) -> None:
    """States are those of bf16; of FP8 a checkpoint has at most the histories of delayed scaling, which bf16 skips."""
    job = job_of(shards, run={**SHORT, "steps": 4, "checkpoints": {"steps": 2}})
    narrow = replace(job, training=replace(job.training, precision=precision))
    at_once = run(narrow, tmp_path / "a")
    run(stopped_after(narrow, 2), tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    second = run(narrow, tmp_path / "b")
    assert equal(whole(at_once), whole(second))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    run(replace(job, training=replace(job.training, precision="bf16")), tmp_path / "c")
    assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a"), rel=5e-3)
