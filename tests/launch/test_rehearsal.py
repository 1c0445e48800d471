"""A rehearsal's points, from records that are known; a rehearsal of a real job is a slow test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.run import points
from shardwise.spec import Job
from training.runs import job_of, write_shards

ROOT = Path(__file__).resolve().parents[2]


def job(devices: int = 2, **strategy: Any) -> Job:
    return Job.from_dict({"model": "tiny", "cluster": f"laptop:{devices}", "strategy": strategy})


def records(**changes: Any) -> list[dict[str, Any]]:
    """Twelve steps as they should be, but for what is changed: a function of the step for each field."""
    found = []
    for step in range(1, 13):
        took = {"seconds": 1.0, "tokens_per_second": 10.0, "mfu": 0.1, "data_wait_seconds": 0.0}
        planned = {"predicted_seconds": 1.0, "predicted_memory_bytes": 100}
        one: dict[str, Any] = {"step": step, "loss": 6 - step / 10, **took, **planned}
        if step % 4 == 3:
            one |= {"memory_bytes": 100, "memory_bytes_of_ranks": [100, 99]}
        one |= {name: value(step) for name, value in changes.items() if name in one}
        found.append(one)
    return found


def failed(restored: int = 1, **changes: Any) -> list[str]:
    return [one.name for one in points(job(dp=2), records(**changes), restored) if not one.passed]


def test_each_point_notices_what_it_is_for() -> None:
    assert failed() == []
    assert failed(loss=lambda step: 5 + step / 10) == ["the loss falls"]
    assert failed(memory_bytes=lambda step: 100 + step)[0] == "memory does not grow after step 5"
    assert failed(memory_bytes_of_ranks=lambda step: [100, 90]) == ["ranks of a stage are equal in memory"]
    assert failed(seconds=lambda step: 2.0) == ["step time as planned"]
    assert failed(predicted_memory_bytes=lambda step: 60) == ["memory as planned"]
    assert failed(restored=0) == ["a checkpoint is saved and restored"]
    assert failed(data_wait_seconds=lambda step: 0.1) == ["data arrives in time"]


@pytest.mark.slow
def test_a_real_job_is_rehearsed(tmp_path: Path) -> None:
    one = job_of(write_shards(tmp_path / "words"), 2, run={"steps": 1000}, dp=2)
    (tmp_path / "job.yaml").write_text(one.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "shardwise", "train", str(tmp_path / "job.yaml"), "--rehearse", "12"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, "--run-folder", str(tmp_path / "run")], env=environment, capture_output=True, text=True, check=False
    )
    # The step time of a laptop is a placeholder, and memory depends on it being a small model: only these must hold.
    assert done.returncode in (0, 1), done.stderr
    assert "pass  the loss falls" in done.stdout
    assert "pass  a checkpoint is saved and restored" in done.stdout
    assert "pass  ranks of a stage are equal in memory" in done.stdout
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
