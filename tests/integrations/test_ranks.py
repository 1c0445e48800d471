"""Two real processes over gloo: a `Trainer` and an Accelerate loop under DDP and FSDP2, Lightning under FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integrations.ranks import launched
from shardwise import status, validate, write_report
from shardwise.interop.jobs import read_job
from shardwise.run.metrics.lines import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launched("trainer_worker.py", folder)


def test_a_trainer_of_two_processes_is_priced_and_recorded(recorded: tuple[Path, str]) -> None:
    folder = recorded[0] / "trainer" / "shardwise"
    job = read_job(folder / "job.yaml")
    assert (job.strategy.data_parallel, job.strategy.zero, job.strategy.microbatch) == (2, 0, 2)
    assert (job.microbatches, job.sequences, job.training.seq) == (2, 8, 16)
    assert (job.training.precision, job.training.optimizer, job.stack.name) == ("fp32", "adamw", "accelerate")
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert [one["step"] for one in lines] == list(range(1, 8))
    assert all(one["seconds"] > 0 and one["predicted_seconds"] > 0 and "loss" in one for one in lines)
    assert [one["step"] for one in lines if "memory_bytes" in one] == [4]  # counted in one step
    record = json.loads((folder / "shardwise.json").read_text(encoding="utf-8"))
    assert record["measured"]["tokens_per_step"] == record["predicted"]["tokens_per_step"] == 8 * 16
    assert record["measured"]["memory_bytes"] > 0 and record["processes"] == 2


@pytest.mark.parametrize(("name", "zero", "sequences"), [("accelerate", 0, 16), ("sharded", 3, 8)])
def test_a_loop_and_a_strategy_are_priced_as_they_run(
    name: str, zero: int, sequences: int, recorded: tuple[Path, str]
) -> None:
    job = read_job(recorded[0] / name / "job.yaml")
    assert (job.strategy.data_parallel, job.strategy.zero, job.sequences) == (2, zero, sequences)
    lines = list(read_lines(recorded[0] / name / "metrics.jsonl"))
    assert [one["step"] for one in lines] == list(range(1, 7))
    record = json.loads((recorded[0] / name / "shardwise.json").read_text(encoding="utf-8"))
    assert record["measured"]["tokens_per_step"] == record["predicted"]["tokens_per_step"] == sequences * 16


def test_fsdp_of_accelerate_and_of_the_trainer_is_read_as_it_runs(recorded: tuple[Path, str]) -> None:
    """More of it is in test_sharded.py, for which every case takes seconds."""
    job = read_job(recorded[0] / "fsdp2" / "job.yaml")
    assert (job.strategy.zero, job.strategy.data_parallel, job.strategy.accumulate) == (3, 2, "local")
    assert (job.strategy.microbatch, job.microbatches, job.sequences) == (4, 2, 16)
    kept = read_job(recorded[0] / "trainer-kept" / "shardwise" / "job.yaml")
    assert (kept.strategy.zero, kept.strategy.keep_parameters, kept.strategy.recompute) == (3, True, "full")
    for case in ("fsdp2", "trainer-kept"):
        first, second = (
            json.loads((recorded[0] / f"{case}-rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)
        )
        assert first["job"] == second["job"] is not None and first["kind"] == "FSDP"
    assert not first.get("reduced")


def test_one_rank_prints_and_all_stop(recorded: tuple[Path, str]) -> None:
    folder, text = recorded
    assert text.count("shardwise: llama on 2 × cpu: ") == text.count("predicted beside measured") == 5
    reasons = [(folder / f"rank-{rank}-stops").read_text(encoding="utf-8") for rank in (0, 1)]
    assert reasons[0] == reasons[1] and "a device needs" in reasons[0]
    assert not (folder / "stopped").exists()


def test_the_other_verbs_read_what_was_recorded(recorded: tuple[Path, str]) -> None:
    scores = validate(recorded[0])
    runs = ["accelerate", "fsdp2", "sharded", "trainer/shardwise", "trainer-kept/shardwise"]
    assert [one.row_id for one in scores.rows] == runs
    assert all(one.time_error is not None and one.memory_error is not None for one in scores.rows)
    assert status(recorded[0] / "sharded").to_dict()["state"] == "ended"
    report = write_report(recorded[0] / "sharded", out=None, search=False)
    assert report.measured is not None and report.measured.steps == 6
