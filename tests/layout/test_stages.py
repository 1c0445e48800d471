"""Stages lie where the schedules that are built run them."""

from __future__ import annotations

import pytest

from cost.builders import LLAMA, MOE, job, switched
from shardwise.layout.stages import placement, rank_contents, stage_contents, stage_layers, stages_of_rank
from shardwise.pipeline import build
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schedules import job_schedules, schedule_record


def case_of(schedule: str, pp: int, model: Model = LLAMA) -> Job:
    chosen = {"interleave": 2} if schedule_record(schedule).chooses_chunks else {}
    batch = {"global_batch": 4 * pp}
    return job(model, switched(pp), batch, pp=pp, dp=1, schedule=schedule, stage_layers="balanced", **chosen)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", job_schedules())
def test_stages_are_where_the_built_schedule_has_them(schedule: str, pp: int) -> None:
    case = case_of(schedule, pp)
    built = build(schedule, pp, 4 * pp, case.strategy.chunks_per_rank)
    assert placement(case) == built.placement
    assert case.strategy.stages == built.stages == len(stage_layers(case))
    for rank in range(pp):
        assert stages_of_rank(case, rank) == tuple(s for s, holder in enumerate(built.placement) if holder == rank)


@pytest.mark.parametrize("schedule", job_schedules())
def test_a_rank_holds_all_that_the_built_schedule_runs_on_it(schedule: str) -> None:
    case = case_of(schedule, 4)
    built = build(schedule, 4, 16, case.strategy.chunks_per_rank)
    whole = rank_contents(job(LLAMA, switched(1), dp=1), 0)
    per_layer = whole.layer_matrices / LLAMA.layers
    for rank in range(4):
        layers = sum(len(stage_layers(case)[stage]) for stage in built.stages_of(rank))
        assert rank_contents(case, rank).layer_matrices == pytest.approx(layers * per_layer)


@pytest.mark.parametrize("model", [LLAMA, MOE])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_what_a_rank_runs_is_what_its_stages_run(schedule: str, model: Model) -> None:
    case = case_of(schedule, 2, model)
    assert [layer for layers in stage_layers(case) for layer in layers] == list(range(case.model.layers))
    for rank in range(2):
        held, parts = rank_contents(case, rank), [stage_contents(case, one) for one in stages_of_rank(case, rank)]
        assert held.layers == sum(one.layers for one in parts)
        assert held.moe_layers == sum(one.moe_layers for one in parts)
        assert held.has_embedding == any(one.has_embedding for one in parts)
        assert held.has_head == any(one.has_head for one in parts)
