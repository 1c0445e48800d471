"""Published fine-tuning runs: rows read as jobs, rows that are not priced, and what the command prints."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.accuracy.fine_tuning_runs import COLUMNS, ran_out, run_from_row
from shardwise.accuracy.table import TableRow
from shardwise.api.validation import validate
from shardwise.spec.errors import SpecError

LORA = {
    "row_id": "ft1", "source": "IBM fms-acceleration benchmarks A100", "model": "mistralai/Mistral-7B-v0.1",
    "method": "lora", "rank": "16", "target_modules": "q_proj k_proj v_proj o_proj", "base_precision": "bf16",
    "trainable_precision": "bf16 mixed", "optimizer": "AdamW", "gpu": "A100-SXM4-80GB", "gpus": "2", "dp": "2",
    "zero_or_fsdp": "FSDP FULL_SHARD", "micro_batch": "4", "grad_accum": "1", "seq": "4096", "packing": "yes",
    "gradient_checkpointing": "yes", "kernels": "none", "framework": "fms-hf-tuning (none)", "rep_samples_s": "2",
    "rep_peak_mem_gib": "20.45", "rep_mem_kind": "allocated (HF Trainer, rank 0)", "fits": "yes",
}  # fmt: skip
QLORA = {"method": "qlora-nf4", "base_precision": "nf4", "framework": "fms-hf-tuning (baseline-peft-bnb)"}


def bench() -> Any:
    path = Path(__file__).parents[2] / "bench" / "fine_tuning.py"
    spec = importlib.util.spec_from_file_location("fine_tuning_bench", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**cells: str) -> TableRow:
    return TableRow({**LORA, **cells})


def test_a_row_becomes_the_job_that_ran() -> None:
    run = run_from_row(row())
    training, strategy = run.job.training, run.job.strategy
    assert training.adapters is not None
    assert (training.adapters.rank, training.adapters.dropout, training.base_precision) == (16, 0.1, "bf16")
    assert (strategy.zero, strategy.recompute, strategy.microbatch, run.job.sequences) == (3, "full", 4, 8)
    assert run.job.stack.adapters == "fp32"
    assert run.job.stack.hooked_inputs
    assert run.reported_seconds == 8 / 2
    assert run.reported_memory_bytes == 20.45 * 2**30


def test_software_follows_the_row() -> None:
    assert not run_from_row(row(**QLORA)).job.stack.upcast_base  # FSDP flattens tensors of one format
    assert run_from_row(row(**QLORA, gpus="1", dp="1")).job.stack.upcast_base
    full = run_from_row(row(method="full", gpus="1", dp="1")).job
    assert (full.recipe.weight, full.recipe.master, full.training.optimizer) == (2, 0, "adamw-bf16-moments")
    upcast = run_from_row(row(method="full", trainable_precision="mixed")).job
    assert (upcast.stack.masters, upcast.training.optimizer) == ("fp32", "adamw")


@pytest.mark.parametrize(
    "cells",
    [
        {"kernels": "compile+optim_in_bwd"},
        {"optimizer": "PagedAdamW8bit"},
        {"packing": "no", "mean_length": "300"},
        {"packing": "no", "notes": "pads to longest in batch of 2"},
    ],
    ids=lambda cells: next(iter(cells.values())),
)
def test_memory_that_is_not_priced_is_not_scored(cells: dict[str, str]) -> None:
    assert run_from_row(row(**cells)).reported_memory_bytes is None


@pytest.mark.parametrize(
    ("cells", "column"),
    [({"model": "T0_3B"}, "model"), ({"method": "adapter_v2"}, "method"), ({"gpu": "Z80"}, "gpu"),
     ({"micro_batch": ""}, "micro_batch"), ({"target_modules": "some layers"}, "target_modules")],
)  # fmt: skip
def test_what_is_not_priced_names_the_column(cells: dict[str, str], column: str) -> None:
    with pytest.raises(SpecError) as caught:
        run_from_row(row(**cells))
    assert caught.value.field == f"row ft1.{column}"


def test_padded_rows_have_a_time_and_no_peak_unless_the_longest_is_all_that_is_known() -> None:
    padded = run_from_row(row(packing="no (padded)", mean_length="445.0"))
    assert (padded.job.training.seq, padded.reported_memory_bytes) == (445, None)
    longest = run_from_row(row(packing="no"))
    assert (longest.job.training.seq, longest.reported_seconds) == (4096, None)


def test_runs_out_of_memory_say_so() -> None:
    failed = run_from_row(row(fits="OOM/failed", rep_samples_s=""))
    assert (ran_out(failed), failed.reported_memory_bytes) == (True, None)
    assert ran_out(run_from_row(row())) is False


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    rows = [
        LORA,
        {**LORA, "row_id": "ft2", "fits": "OOM", "micro_batch": "64"},
        {**LORA, "row_id": "ft3", "gpu": "Z80"},
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({*COLUMNS, *LORA}), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_table_is_told_by_its_columns(table: Path) -> None:
    scores = validate(table)
    assert [score.row_id for score in scores.rows] == ["ft1", "ft2"]


def test_the_command_counts_rows_reasons_and_rooms(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench()
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", str(table)])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "2 rows priced, 1 not: gpu 1" in printed
    assert "out of memory: 1 runs, refused 1, warned 0, tight 0, fits 0" in printed
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", str(table) + ".none"])
    assert command.main() == 0
    assert capsys.readouterr().out.startswith("no table of fine-tuning runs at")


def test_sources_count_equally() -> None:
    command = bench()
    found = command._mean([{"time": command.errors([0.1] * 9)}, {"time": command.errors([-0.3])}], "time")
    assert (found.rows, found.mean, found.bias) == (10, pytest.approx(0.2), pytest.approx(-0.1))
