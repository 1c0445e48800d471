"""What `verify` runs in place of a large job: the same kind of layout and of model."""

from __future__ import annotations

import pytest

from shardwise.measure.reference import on_fewer_ranks, with_small_model
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import techniques_of
from shardwise.spec.training import Training


def large(model: str, nodes: int, batch: int, **strategy: object) -> Job:
    return Job(
        model=model,  # type: ignore[arg-type]
        cluster=f"dgx-h100:{nodes}",  # type: ignore[arg-type]
        strategy=Strategy(**strategy),  # type: ignore[arg-type]
        training=Training(global_batch=batch, seq=8192),
    )


JOBS = {
    "dense": large("llama3-70b", 32, 512, tp=8, pp=4, zero=1, schedule="interleaved", interleave=4,
                   order=("tp", "pp", "dp", "cp")),
    "hybrid": large("llama3-8b", 8, 512, zero=3, shard_group=8),
    "experts": large("deepseek-v2-lite", 8, 512, pp=1, ep=8, expert_tp=1, tp=2, zero=1),
    "long": large("llama3-8b", 8, 64, cp=8, tp=2, context_method="ring", recompute="full"),
    "own stages": large("llama3-8b", 4, 64, pp=4, stage_layers=(7, 9, 9, 7), schedule="zb-h1"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_large_job_keeps_its_techniques_on_few_ranks(name: str) -> None:
    job = JOBS[name]
    small = on_fewer_ranks(job, 8)
    assert small.strategy.world <= 8 and small.strategy.order == job.strategy.order
    for dimension in ("tp", "cp", "dp", "pp"):
        assert (small.strategy.degree(dimension) > 1) == (job.strategy.degree(dimension) > 1)
    assert set(techniques_of(small)) == set(techniques_of(job))


@pytest.mark.parametrize("name", JOBS)
def test_a_small_model_is_of_the_same_kind(name: str) -> None:
    job = on_fewer_ranks(JOBS[name], 8)
    small = with_small_model(job)
    assert small.model.hidden <= 256 and small.training.seq <= 256
    widths = {"own-stages", "ragged-widths", "ragged-blocks"}  # what depends on them only matters to FP8
    assert set(techniques_of(small)) - widths == set(techniques_of(job)) - widths
    assert small.model.activation == job.model.activation and small.model.norm == job.model.norm


def test_a_job_that_is_small_enough_stays() -> None:
    job = large("llama3-8b", 1, 8, tp=8)
    assert on_fewer_ranks(job, 8) is job


def test_too_few_processes_for_every_dimension() -> None:
    job = large("llama3-8b", 8, 512, tp=2, pp=2, cp=2, zero=1)
    with pytest.raises(SpecError, match="use max_processes=16"):
        on_fewer_ranks(job, 8)
