"""Plans for other frameworks: what each of them can say, and the best of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf

import pytest

from interop.frameworks.random_jobs import drawn
from planner.cases import fits, job_of, within
from shardwise.interop.frameworks import TARGETS, as_run_by, lacking, target
from shardwise.interop.frameworks.job_fields import effective_fields
from shardwise.planner.advice.frameworks import requests_for, searched_for, who_can_run
from shardwise.planner.candidate import candidate, strategy_words
from shardwise.planner.constraints import ACTS, FIELDS, OFFLOADS, Allowed, Constraints, field_value
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search
from shardwise.planner.search.supported import findings_of
from shardwise.report.plan import runner_lines
from shardwise.spec.clusters import cluster_from
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


def plan_for(request: Request, name: str) -> Plan | Search:
    return searched_for(request, name)[0]


def requested_for(job: Job, name: str) -> Request:
    """The request for the framework's usual way."""
    return next(iter(requests_for(Request(job), name).values()))


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


@pytest.mark.quick(2)
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


LARGE = ("llama3-8b", "llama3-70b", "gpt3-13b", "qwen3-32b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")
CLUSTERS = ("dgx-h100:8", "dgx-h100:64", "dgx-a100:16", "dgx-b200:8")
# Every model with every framework, each on one cluster in turn: all three of each would take an hour.
GRID = [
    (model, CLUSTERS[(row + column) % len(CLUSTERS)], name)
    for row, model in enumerate(LARGE)
    for column, name in enumerate(TARGETS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster", "name"), GRID)
def test_every_first_choice_is_what_its_configuration_says(model: str, cluster: str, name: str) -> None:
    try:
        found = plan_for(Request(job_of(model, cluster, 1024, seq=2048)), name)
    except SpecError as error:
        assert error.field == "⟨framework⟩"  # a precision or layout that the framework does not have
        return
    if isinstance(found, Plan):  # else nothing fits
        assert_priced_as_exported(found, name)


@pytest.mark.slow
def test_selective_recompute_for_megatron_is_what_its_modules_make_again() -> None:
    """Nothing of a dense model; with experts their activation, with latent attention norms and up-projections."""
    dense, mixtral = job_of("llama3-70b", "dgx-h100:8", 64), job_of("mixtral-8x7b", "dgx-h100:8", 64)
    deepseek = job_of("deepseek-v3", "dgx-h100:8", 64)
    assert Allowed(("none", "full")) == requested_for(dense, "megatron").constraints.allowed["recompute"]
    for job, operators in ((mixtral, ("activation",)), (deepseek, ("norm", "up-projection"))):
        own = requested_for(job, "megatron")
        assert own.job.selective_operators == operators
        assert "recompute" not in own.constraints.allowed
        assert own.job.stack.name == "megatron-core" and own.any_priced
    titan = requested_for(dense, "torchtitan")
    assert titan.job.selective_operators == ("alternate-products",)
    assert titan.job.training.precision == "bf16-fp32-grads"  # it reduces in fp32


def test_a_precision_that_a_framework_lacks_is_refused() -> None:
    job = job_of("llama3.2-3b", "dgx-h100:1", 32)
    half = job.unchecked(training=job.training.unchecked(precision="fp16"))
    with pytest.raises(SpecError, match="torchtitan does not train in fp16"):
        plan_for(Request(half), "torchtitan")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [("qwen3-30b-a3b", "colossalai")])
def test_what_cannot_be_said_together_is_left_out_and_nothing_else(model: str, name: str) -> None:
    """The best within a framework's values is no plan for these; the best that can be said is found all the same."""
    within_values = next(iter(requests_for(request_of(model), name).values()))
    found, others = plan_for(request_of(model), name), plan(within_values)
    assert isinstance(found, Plan) and isinstance(others, Plan)
    assert found.request.constraints.excluded and any(lacks(one.job, name) for one in others.candidates)
    said = [candidate(as_run_by(one.job, target(name))) for one in others.candidates if not lacks(one.job, name)]
    able = [one.seconds_per_token for one in said if one.memory.total <= within_values.capacity_bytes]
    assert others.fastest.seconds_per_token <= found.fastest.seconds_per_token <= min(able, default=inf)
    assert lacks(found.best.job, name) == []


def fitting_jobs(name: str, number: int) -> Iterator[Job]:
    """Random jobs that the framework can say, as it runs them, that fit with room to spare."""
    for drawn_one in drawn(name, 1, number):
        levels = drawn_one.cluster.levels
        job = as_run_by(replace(drawn_one, cluster=replace(cluster_from("dgx-h100:1"), levels=levels)), target(name))
        # A framework that cuts stages itself may need a few percent less than the cuts that are searched.
        room = 0.95 * Request(job, any_priced=True).capacity_bytes
        said = not lacking(job, name) and not findings_of(job, any_priced=True)
        if said and fits(Request(job, any_priced=True, memory_bytes=room), job):
            yield job


def asked_as(job: Job) -> Constraints:
    """Every field of a strategy that has an effect; stages are cut as the planner likes."""
    strategy = job.strategy
    fields = [one for one in FIELDS if one != "stage_layers" and (one not in ACTS or ACTS[one](strategy))]
    return Constraints({one: Allowed((field_value(strategy, one),)) for one in fields})


def assert_found(job: Job, name: str) -> None:
    found = plan_for(Request(job, asked_as(job)), name)
    assert isinstance(found, Plan)
    assert found.best.job.stack == job.stack and found.best.job.training.precision == job.training.precision
    ignored = ("strategy.stage_layers", "strategy.overlap", "strategy.dispatch", "run.")  # not asked for
    there, here = effective_fields(found.best.job), effective_fields(job)
    assert {path: value for path, value in there.items() if value != here[path] and not path.startswith(ignored)} == {}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", TARGETS)
def test_what_an_export_can_say_is_found_if_it_is_asked_for(name: str) -> None:
    for job in islice(fitting_jobs(name, 60), 3):
        assert_found(job, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_an_export_can_say_is_in_the_space_of_its_framework(name: str) -> None:
    jobs = list(fitting_jobs(name, 150))
    assert len(jobs) > 20
    for job in jobs:
        assert_found(job, name)
        if job.strategy.offload in OFFLOADS.values():  # no search has parts of states, or disks
            spaces = requests_for(Request(job), name).values()
            stages = "even" if isinstance(job.strategy.stage_layers, tuple) else job.strategy.stage_layers
            assert any(one.allows(job.strategy.unchecked(stage_layers=stages)) for one in spaces)


def test_a_model_that_needs_gradient_checkpointing_is_planned_for_accelerate() -> None:
    asked = Request(job_of("llama3-70b", "dgx-h100:16", 512, seq=8192), within(tp="1", cp="1", microbatch="1"))
    found = plan_for(asked, "accelerate")
    assert isinstance(found, Plan)
    assert found.best.job.strategy.recompute == "full" and found.best.job.strategy.zero == 3


def test_what_a_framework_lacks_is_one_line_that_names_it() -> None:
    with pytest.raises(SpecError, match=r"accelerate does not have pp 2.*no pipeline of its own"):
        plan_for(Request(job_of("llama3-8b", "dgx-h100:1", 64), within(pp="2")), "accelerate")


def test_a_plan_says_who_can_run_it_and_what_the_others_lack() -> None:
    found = plan(request_of("llama3.2-3b"))
    assert isinstance(found, Plan)
    verdicts = who_can_run(found)
    assert [one.name for one in verdicts] == list(TARGETS)
    lines = list(runner_lines(found.best, verdicts))[2:]
    for one, line in zip(verdicts, lines, strict=True):
        assert ("runs it" in line) == one.runs and ("cannot run it" in line) == (not one.runs)
        assert all(lost.why in line for lost in one.lacks), "a lack is said with its reason"
        shown = one.own is None or one.runs or strategy_words(one.own.job.strategy) in line
        assert shown and "near 1" not in line
    assert any(one.lacks for one in verdicts)
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
        plan_for(request_of("llama3.2-3b"), "deepsped")
