"""Stages divided by time and memory: faster, never slower, and they fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from shardwise.cost.analysis import analyze
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import simulated_step
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.constraints import Constraints, parse_constraints
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.stages import WORTH, fits, pieces_of, with_best_stages
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import job_schedules
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.training import Training

SCHEDULES = job_schedules()


def job(model: str = "llama3.2-1b", cluster: str = "dgx-h100", batch: int = 64, **strategy: Any) -> Job:
    strategy = {"pp": 8, "stage_layers": "balanced", **strategy}
    return Job(
        model=model,  # type: ignore[arg-type]
        cluster=cluster,  # type: ignore[arg-type]
        training=Training(global_batch=batch, seq=4096),
        strategy=Strategy(**strategy),
    )


def divided(one: Job, capacity: float | None = None) -> tuple[Candidate, Candidate]:
    before = candidate(one)
    return before, with_best_stages(before, one.cluster.device.memory if capacity is None else capacity)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    """The head of llama3.2-1b takes as long as three layers: an even last stage makes all others wait."""
    before, after = divided(job())
    counts = after.job.strategy.stage_layers
    assert isinstance(counts, tuple)
    assert sum(counts) == 16
    assert counts[-1] < 2
    assert after.step_seconds < 0.75 * before.step_seconds
    assert peak_memory(after.job).total <= after.job.cluster.device.memory


@pytest.mark.quick(8)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("zb-1p", "zb-2p")])
@pytest.mark.parametrize("model", ["llama3.2-1b", "llama3-8b"])
def test_never_slower_and_always_fits(model: str, schedule: str) -> None:
    interleave = 2 if schedule == "interleaved" else 1
    before, after = divided(job(model, batch=32, schedule=schedule, interleave=interleave))
    assert after is before or after.step_seconds < (1 - WORTH) * before.step_seconds
    if after is not before:
        assert fits(after.job, after.job.cluster.device.memory)
        assert after.job == replace(
            before.job, strategy=replace(before.job.strategy, stage_layers=after.job.strategy.stage_layers)
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_uneven_stages(schedule: str) -> None:
    """An explicit division with an end that has no layers is priced, held, supported, written and read again."""
    strategy = Strategy(pp=4, schedule=schedule, interleave=2 if schedule == "interleaved" else 1)  # type: ignore[arg-type]
    stages = strategy.stages
    counts = (3, *[1] * (stages - 3), 16 - 3 - (stages - 3), 0)
    own = job(batch=16, pp=4, schedule=schedule, interleave=strategy.interleave, stage_layers=counts)
    even = job(batch=16, pp=4, schedule=schedule, interleave=strategy.interleave, stage_layers="even")
    assert stage_layer_counts(own.model, own.strategy) == counts
    assert simulated_step(predict(own)).step_seconds > 0
    assert peak_memory(own).total > 0
    assert analyze(own).memory.total > 0
    assert verdict(own).status == verdict(even).status
    assert Job.from_yaml(own.to_yaml()) == own


def test_mixtures_count_their_layers_by_kind() -> None:
    """The first layers of deepseek-v2-lite are dense and faster: the first stage takes more of them."""
    one = job("deepseek-v2-lite", "dgx-h100:2", batch=128, pp=2, ep=8, expert_tp=1, zero=1)
    pieces = pieces_of(one)
    assert pieces.layers[0].seconds < pieces.layers[-1].seconds
    before, after = divided(one)
    assert after.step_seconds <= before.step_seconds


def test_memory_limits_what_a_stage_takes() -> None:
    """The fastest division needs more memory than there is: another one is taken, or none."""
    even = job("llama3-8b", batch=32, pp=4, tp=2)
    _, free = divided(even)
    needed = max(memory_of_rank(free.job, rank).total for rank in range(4))
    before, tight = divided(even, needed * 0.97)
    assert tight is before or fits(tight.job, needed * 0.97)
    assert tight.step_seconds >= free.step_seconds


def test_the_pieces_add_up_to_the_stages() -> None:
    """A rank's seconds and states are those of its pieces."""
    one = job("llama3-8b", batch=32, pp=4, tp=2)
    pieces = pieces_of(one)
    prediction = predict(one)
    calls = 2 * one.cluster.device.efficiency.stage_call_seconds
    for rank in prediction.ranks:
        own = pieces.of_rank(one, rank.contents.rank)
        assert own.seconds + calls == pytest.approx(rank.microbatch_seconds, rel=0.02)
        memory = memory_of_rank(one, rank.contents.rank)
        head = 0.0 if not rank.contents.has_head else memory.activations
        assert own.bytes == pytest.approx(memory.states, abs=head + 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 32])
def test_no_division_is_much_better(batch: int) -> None:
    """Against all 273 divisions of 16 layers and two ends over 4 stages with at most 7 layers each."""
    one = job(batch=batch, pp=4, tp=2)
    _, after = divided(one)
    best = after.step_seconds
    for cuts in combinations(range(1, 18), 3):
        counts = [end - start for start, end in zip((0, *cuts), (*cuts, 18))]
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
        if max(counts) <= 7:
            other = replace(one, strategy=replace(one.strategy, stage_layers=tuple(counts)))
            best = min(best, candidate(other).step_seconds)
    assert after.step_seconds <= 1.015 * best


def test_the_planner_offers_them() -> None:
    one = job("llama3-8b", pp=8)
    constraints = Constraints(parse_constraints("pp=8,schedule=1f1b,microbatch=1,tp=1"))
    found = plan(Request(one, constraints))
    assert isinstance(found, Plan)
    assert isinstance(found.best.job.strategy.stage_layers, tuple)
    assert any(not isinstance(one.job.strategy.stage_layers, tuple) for one in found.candidates)
    fixed = Constraints(parse_constraints("pp=8,schedule=1f1b,microbatch=1,tp=1,stage_layers=even"))
    asked = plan(Request(one, fixed))
    assert isinstance(asked, Plan)
    assert all(one.job.strategy.stage_layers == "even" for one in asked.candidates)
    assert asked.best.step_seconds >= found.best.step_seconds


def test_a_job_without_a_pipeline_stays_as_it_is() -> None:
    before, after = divided(job(pp=1, dp=8))
    assert after is before
