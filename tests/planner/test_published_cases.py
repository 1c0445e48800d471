"""DeepSeek-V3 and Llama-3 405B as their authors trained them: described, priced, in memory, found by the planner."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cost.memory.device import memory_of_rank
from shardwise.interop.jobs import read_job
from shardwise.layout.stages import rank_contents, stage_layers

_SPEC = importlib.util.spec_from_file_location("cases_bench", Path(__file__).parents[2] / "bench" / "cases.py")
assert _SPEC is not None and _SPEC.loader is not None
BENCH: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["cases_bench"] = BENCH
_SPEC.loader.exec_module(BENCH)
DEEPSEEK, *LLAMA = BENCH.CASES
published_cases = pytest.mark.parametrize("case", BENCH.CASES, ids=lambda case: case.file)


@published_cases
def test_it_fits_in_memory_and_takes_about_as_long_as_published(case: Any) -> None:
    priced = case.priced()
    assert priced.fits
    assert 0.65 < priced.predicted_seconds / case.seconds(priced) < 1.35


@pytest.mark.slow
@published_cases
def test_the_planner_reaches_the_published_layout_from_its_degrees(case: Any) -> None:
    """Schedule, interleaving, microbatch and recompute are the planner's; it had no chunk for the embedding alone."""
    assert case.completed().step_seconds < 1.02 * case.priced().predicted_seconds


def test_published_figures_by_hand() -> None:
    """180,000 GPU hours are 3.66 days of 2,048; 430 TFLOP/s a GPU are 43% of 989.4 (43.5)."""
    published = DEEPSEEK.seconds(DEEPSEEK.priced())
    assert 1e12 / (15360 * 4096) * published / 86400 == pytest.approx(180_000 / 2048 / 24)
    for case, share in zip(LLAMA, (0.43, 0.41, 0.38)):
        priced = case.priced()
        mfu = BENCH.bf16_mfu(case.job, case.seconds(priced), priced.flops_per_step())
        assert mfu == pytest.approx(share, abs=0.007)


def test_llama_has_the_embedding_and_the_head_in_chunks_of_their_own() -> None:
    job = LLAMA[0].job
    counts = tuple(map(len, stage_layers(job)))
    assert (counts[0], counts[-1]) == (0, 0) and set(counts[1:-1]) == {1} and len(counts) == 128
    assert counts == tuple(map(len, stage_layers(job.with_strategy(stage_layers="balanced"))))


def test_deepseek_shares_one_embedding_between_the_model_and_its_prediction_module() -> None:
    """The first and last stage are on the same ranks (section 3.2.3); moments have two bytes each (3.3.3)."""
    job = read_job(BENCH.EXAMPLES / DEEPSEEK.file)
    ends = rank_contents(job, 0).others, rank_contents(job, 15).others
    matrix = job.model.vocab * job.model.hidden
    assert ends[0] == ends[1] and 2 * matrix < ends[0] < 2.5 * matrix
    wide = job.unchecked(training=job.training.unchecked(optimizer="adamw"))
    held = rank_contents(job, 1)
    saved = memory_of_rank(wide, 1).optimizer - memory_of_rank(job, 1).optimizer
    assert saved == pytest.approx(4 * (held.dense / 128 + held.experts / 2))
