"""Plans for other frameworks: what each of them can say, and the best of that."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.cases import job_of, within
from shardwise.interop.frameworks import TARGETS, as_run_by, lacking, target
from shardwise.planner.advice.frameworks import expressible, in_own_way, plan_for, who_can_run
from shardwise.planner.candidate import candidate
from shardwise.planner.constraints import Allowed
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.report.plan import runner_lines
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
    return [one.field for one in lacking(job, name) if one.field.startswith("strategy.")]


def there_and_back(job: Job, name: str) -> Job:
    """The job that the framework's configuration makes, as `analyze` reads it, with what it leaves to the script."""
    one = TARGETS[name]
    exported = one.export(job)
    (text,) = exported.files.values()
    given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
    back = one.read(text, job.model, job.cluster, given)
    fields = {**back.fields, **{lost.field: lost.value for lost in exported.elsewhere}}
    return replace(back, fields=fields).job(job.cluster, None if one.carries_model else job.model)


def assert_priced_as_exported(found: Plan, name: str) -> None:
    """What was priced for a framework is what its configuration says: time and memory, to a thousandth."""
    best = found.best
    assert lacks(best.job, name) == []
    again = candidate(there_and_back(best.job, name))
    assert again.step_seconds == pytest.approx(best.step_seconds, rel=1e-3)
    assert again.memory.total == pytest.approx(best.memory.total, rel=1e-3)
    assert best.job.stack == again.job.stack
    assert best.job.training.precision == again.job.training.precision


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_for_a_framework_is_what_its_configuration_says(model: str, name: str) -> None:
    if (model, name) == ("qwen3-30b-a3b", "nanotron"):
        with pytest.raises(SpecError, match=r"nanotron does not have .*model\.qk_norm"):
            plan_for(request_of(model), name)
        return
    found = plan_for(request_of(model), name)
    assert isinstance(found, Plan)
    assert_priced_as_exported(found, name)


GRID = [
    (model, cluster)
    for model in ("llama3-8b", "llama3-70b", "gpt3-13b", "qwen3-32b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")
    for cluster in ("dgx-h100:8", "dgx-h100:64", "dgx-a100:16", "dgx-b200:8")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("model", "cluster"), GRID)
def test_every_first_choice_is_what_its_configuration_says(model: str, cluster: str, name: str) -> None:
    try:
        found = plan_for(Request(job_of(model, cluster, 1024, seq=2048)), name)
    except SpecError as error:
        assert error.field == "--for"  # a precision or layout that the framework does not have
        return
    if isinstance(found, Plan):  # else nothing fits
        assert_priced_as_exported(found, name)


def test_selective_recompute_for_megatron_is_what_its_modules_make_again() -> None:
    """Nothing of a dense model; with experts their activation, with latent attention norms and up-projections."""
    dense, mixtral = job_of("llama3-70b", "dgx-h100:8", 64), job_of("mixtral-8x7b", "dgx-h100:8", 64)
    deepseek = job_of("deepseek-v3", "dgx-h100:8", 64)
    assert Allowed(("none", "full")) == expressible(Request(dense), "megatron").constraints.allowed["recompute"]
    for job, operators in ((mixtral, ("activation",)), (deepseek, ("norm", "up-projection"))):
        own = in_own_way(Request(job), "megatron")
        assert own.job.selective_operators == operators
        assert "recompute" not in expressible(own, "megatron").constraints.allowed
        assert own.job.stack.name == "megatron-core" and own.any_priced
    titan = in_own_way(Request(dense), "torchtitan")
    assert titan.job.selective_operators == ("alternate-products",)
    assert titan.job.training.precision == "bf16-fp32-grads"  # it reduces in fp32


def test_a_precision_that_a_framework_lacks_is_refused() -> None:
    job = job_of("llama3.2-3b", "dgx-h100:1", 32)
    half = job.unchecked(training=job.training.unchecked(precision="fp16"))
    with pytest.raises(SpecError, match="torchtitan does not train in fp16"):
        plan_for(Request(half), "torchtitan")


@pytest.mark.parametrize(("model", "name"), [("qwen3-30b-a3b", "colossalai")])
def test_what_cannot_be_said_together_is_left_out_and_nothing_else(model: str, name: str) -> None:
    """The best within a framework's values is no plan for these; the best that can be said is found all the same."""
    within_values = expressible(in_own_way(request_of(model), name), name)
    found, others = plan_for(request_of(model), name), plan(within_values)
    assert isinstance(found, Plan) and isinstance(others, Plan)
    assert found.request.constraints.excluded and any(lacks(one.job, name) for one in others.candidates)
    said = [candidate(as_run_by(one.job, target(name))) for one in others.candidates if not lacks(one.job, name)]
    able = [one.seconds_per_token for one in said if one.memory.total <= within_values.capacity_bytes]
    assert others.fastest.seconds_per_token <= found.fastest.seconds_per_token <= min(able)
    assert lacks(found.best.job, name) == []


def test_a_plan_says_who_can_run_it_and_what_the_others_lack() -> None:
    found = plan(request_of("llama3.2-3b"))
    assert isinstance(found, Plan)
    verdicts = who_can_run(found)
    assert [one.name for one in verdicts] == list(TARGETS)
    for one in verdicts:
        assert one.lacks == tuple(lacking(found.best.job, one.name))
        if one.own is not None:
            assert lacks(one.own.job, one.name) == []
            assert one.own.job.stack.name in (*TARGETS[one.name].stacks, "deepspeed")
            assert one.own.memory.total <= found.request.capacity_bytes


def test_fully_sharded_data_parallelism_is_something_that_torchtitan_runs() -> None:
    """Its own case, Llama 3 8B on eight H100: fp32 gradients are a difference with a price, and no lack."""
    constraints = within(tp="1", cp="1", pp="1", zero="3", recompute="none,selective", microbatch="1")
    found = plan(Request(job_of("llama3-8b", "dgx-h100:1", 64, seq=8192), constraints))
    assert isinstance(found, Plan)
    (verdict,) = (one for one in who_can_run(found) if one.name == "torchtitan")
    assert not any(lost.field == "training.precision" for lost in verdict.lacks)
    assert verdict.own is not None and "fp32 gradients" in verdict.differs
    line = next(line for line in runner_lines(found.best, [verdict]) if "torchtitan:" in line)
    assert "with fp32 gradients" in line and "GiB (" in line


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
