"""Plans for other frameworks: what each of them can say, and the best of that."""

from __future__ import annotations

from functools import cache

import pytest

from planner.cases import job_of, within
from shardwise.interop.frameworks import TARGETS, can_run
from shardwise.planner.constraints import Allowed
from shardwise.planner.frameworks import expressible, framework_filters, plan_for, who_can_run
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search import search
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

MODELS = {"llama3.2-3b": "dgx-h100:1", "qwen3-30b-a3b": "dgx-h100:4"}


@cache
def request_of(model: str) -> Request:
    constraints = within(microbatch="1", pp="1,2", tp="1,2", cp="1,2", recompute="none,full", interleave="1,2")
    constraints = constraints.with_allowed({"recompute_layers": Allowed((None,))})
    if model == "qwen3-30b-a3b":
        constraints = constraints.with_allowed({"cp": Allowed((1,)), "tp": Allowed((1,)), "ep": Allowed((1, 8))})
    return Request(job_of(model, MODELS[model], 32, seq=4096), constraints)


def lacks(job: Job, name: str) -> list[str]:
    """Fields of the strategy that a framework cannot express."""
    return [one.field for one in can_run(job, name) if one.field.startswith("strategy.")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_for_a_framework_lacks_nothing_there(model: str, name: str) -> None:
    found = plan_for(request_of(model), name)
    assert isinstance(found, Plan)
    assert lacks(found.best.job, name) == []


@pytest.mark.parametrize(("model", "name"), [("qwen3-30b-a3b", "colossalai"), ("llama3.2-3b", "accelerate")])
def test_what_cannot_be_said_together_is_left_out_and_nothing_else(model: str, name: str) -> None:
    """The best within a framework's values is no plan for these; the best that can be said is found all the same."""
    found, others = plan_for(request_of(model), name), plan(expressible(request_of(model), name))
    assert isinstance(found, Plan) and isinstance(others, Plan)
    assert found.request.constraints.excluded and lacks(others.best.job, name)
    able = [one.seconds_per_token for one in others.candidates if not lacks(one.job, name)]
    assert others.fastest.seconds_per_token <= found.fastest.seconds_per_token <= min(able)
    assert lacks(found.best.job, name) == []


@pytest.mark.parametrize("model", MODELS)
def test_one_search_finds_what_a_search_for_each_framework_finds(model: str) -> None:
    """The best within each framework's values, kept beside the best of all."""
    request = request_of(model)
    filters = framework_filters(request)
    together = search(request.space(offload=False), filters=filters, kept=1)
    assert set(together.of_filters) == set(TARGETS)
    for name in TARGETS:
        alone = search(expressible(request, name).space(offload=False), kept=1)
        assert together.of_filters[name].seconds_per_sequence == alone.best[0].seconds_per_sequence


def test_a_plan_says_who_can_run_it_and_what_the_others_lack() -> None:
    request = request_of("llama3.2-3b")
    found = plan(request, filters=framework_filters(request))
    assert isinstance(found, Plan)
    verdicts = who_can_run(found)
    assert [one.name for one in verdicts] == list(TARGETS)
    for one in verdicts:
        assert one.lacks == tuple(can_run(found.best.job, one.name))
        assert one.runs == (not one.lacks)
        if one.own is not None:
            assert lacks(one.own.job, one.name) == []
            assert one.own.seconds_per_token >= found.best.seconds_per_token * 0.994


def test_plain_data_parallelism_is_plain() -> None:
    found = plan_for(request_of("llama3.2-3b"), "ddp")
    assert isinstance(found, Plan)
    for one in found.candidates:
        strategy = one.job.strategy
        assert (strategy.tp, strategy.cp, strategy.pp, strategy.ep, strategy.zero) == (1, 1, 1, 1, 0)
        assert strategy.dp == one.job.cluster.devices and not strategy.offload.any


def test_a_framework_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SpecError, match="deepspeed"):
        expressible(request_of("llama3.2-3b"), "deepsped")
