"""Peaks of Megatron-LM's functional tests: settings by the row's words, and how far predicted bytes are off."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from shardwise.accuracy.runs import PublishedRun, read_runs
from shardwise.accuracy.scores import predicted_memory

TABLE = Path(__file__).parents[2] / "validation" / "memory_runs.csv"


@cache
def runs() -> dict[str, PublishedRun]:
    return {run.row_id.removeprefix("mlm_"): run for run in read_runs(TABLE)}


def error(run: PublishedRun) -> float:
    assert run.reported_memory_bytes
    return predicted_memory(run) / run.reported_memory_bytes - 1


def test_every_row_reports_memory_alone() -> None:
    assert len(runs()) == 268
    assert all(run.reported_seconds is None and run.reported_memory_bytes for run in runs().values())


def test_mean_error() -> None:
    errors = [abs(error(run)) for run in runs().values() if not run.set_aside]
    assert sum(errors) / len(errors) < 0.02
    assert sorted(errors)[len(errors) // 2] < 0.015


@pytest.mark.parametrize(
    ("row_id", "attention", "dropout", "deterministic"),
    [
        ("gpt_gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files_dev_dgx_a100", "unfused", True, True),
        ("gpt_gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_dev_dgx_h100", "fused", True, True),
        ("gpt_gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_dev_dgx_gb200", "flash-2", True, True),
        ("gpt_gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_lts_dgxa100_dracooci", "unfused", True, True),
        ("gpt_gpt3_mcore_te_tp2_pp2_cp2_nondeterministic_dev_dgx_a100", "flash-2", False, False),
    ],
)
def test_settings_of_a_test(row_id: str, attention: str, dropout: bool, deterministic: bool) -> None:
    job = runs()[row_id].job
    assert (job.stack.attention, job.training.dropout, job.stack.deterministic) == (attention, dropout, deterministic)
    assert error(runs()[row_id]) == pytest.approx(0, abs=0.02)


def test_sizes_in_the_notes() -> None:
    """Narrow latent attention, experts that are split, half an expert's width that every token passes."""
    latent = runs()["gpt_gpt3_mcore_te_tp2_pp2_mla_dev_dgx_a100"].job.model.mla
    assert latent and (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.value_dim) == (192, 64, 16, 16)
    split = runs()["moe_gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer_dev_dgx_h100"].job
    assert split.strategy.expert_tensor_parallel == 2
    assert split.model.moe and split.model.moe.shared_ffn == split.model.moe.ffn / 2
