"""The step with its pipeline simulated: the times it gives the stages, and where it must equal the closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost.builders import GPT, LLAMA, MLA_MOE, job
from cost.jobs import valid_jobs
from effort import calls_of, examples
from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.compute.roofline import Seconds
from shardwise.cost.step.prediction import Prediction, predict
from shardwise.cost.step.simulation import pipeline_times, simulated_step, step_parts
from shardwise.layout.stages import RankContents, rank_contents, stages_of_rank
from shardwise.pipeline import bubble_is_exact, bubble_seconds
from shardwise.spec.job import Job
from shardwise.spec.schedules import job_schedules

SCHEDULES = job_schedules()

TWO_CHUNKS = ("interleaved", "zbv", "v-half", "v-min", "dualpipev")


def pipelined(schedule: str, pp: int = 4, microbatches: int = 16, model: Any = GPT, **strategy: Any) -> Job:
    interleave = 2 if schedule == "interleaved" else 1
    fields = {"pp": pp, "dp": 2, "schedule": schedule, "interleave": interleave, **strategy}
    return job(model, training={"global_batch": 2 * microbatches}, **fields)


@dataclass(frozen=True)
class FixedRank:
    """A pipeline rank that takes what a test says."""

    job: Job
    contents: RankContents
    passes: Seconds
    message_seconds: float = 0.0

    @property
    def microbatches(self) -> int:
        return self.job.microbatches

    @property
    def microbatch_seconds(self) -> float:
        return float(self.passes.total)


@settings(max_examples=examples(150), deadline=None)
@given(case=valid_jobs())
def test_any_job_can_be_simulated(case: Job) -> None:
    prediction = predict(case)
    step = simulated_step(prediction)
    work = case.microbatches * prediction.slowest.microbatch_seconds
    assert step.step_seconds == step.pipeline_seconds + prediction.tail_seconds
    assert step.bubble_seconds == pytest.approx(step.pipeline_seconds - work)
    peak = case.cluster.devices * case.cluster.device.peak_flops(case.training.recipe.compute)
    flops = flops_per_token(case.model, case.training.seq) * case.tokens_per_step
    assert step.mfu * step.step_seconds * peak == pytest.approx(flops)
    assert step.tokens_per_second * step.step_seconds == pytest.approx(case.tokens_per_step)
    if case.strategy.schedule != "dualpipe":
        assert step.bubble_seconds >= -1e-9 * work
    assert (step.timeline is None) == (case.strategy.pp == 1)


@settings(max_examples=examples(150), deadline=None)
@given(case=valid_jobs())
def test_the_stages_of_a_rank_take_what_the_rank_takes(case: Job) -> None:
    prediction = predict(case)
    if case.strategy.pp == 1:
        return
    times = pipeline_times(prediction)
    kinds = {(r.contents.layers, r.contents.has_embedding, r.contents.has_head, r.contents.moe_layers): r
             for r in prediction.ranks}  # fmt: skip
    for number in range(case.strategy.pp):
        own = rank_contents(case, number)
        rank = kinds[own.layers, own.has_embedding, own.has_head, own.moe_layers]
        stages = stages_of_rank(case, number)
        assert sum(times.forward[s] for s in stages) == pytest.approx(rank.passes.forward)
        assert sum(times.input_grad[s] for s in stages) == pytest.approx(rank.passes.input_gradient)
        assert sum(times.weight_grad[s] for s in stages) == pytest.approx(rank.passes.weight_gradient)


@pytest.mark.parametrize("schedule", TWO_CHUNKS)
def test_the_chunk_with_the_head_takes_longer_than_its_sisters(schedule: str) -> None:
    times = pipeline_times(predict(pipelined(schedule, model=LLAMA)))
    assert times.forward[-1] > 1.05 * times.forward[-2]
    assert times.forward[1] == pytest.approx(times.forward[2])


def test_uneven_stages_and_prediction_modules_are_given_their_own_times() -> None:
    times = pipeline_times(predict(pipelined("interleaved", 2, model=LLAMA, stage_layers=[1, 3, 2, 2])))
    assert times.forward[1] == pytest.approx(3 * times.forward[0], rel=0.2)
    case = pipelined("interleaved", 2, model=MLA_MOE, ep=2, stage_layers=[3, 2, 2, 1])
    times = pipeline_times(predict(case))
    assert times.forward[3] > times.forward[2] > times.forward[1] * 0.9  # one layer, a module's layer and two heads


def test_one_stage_has_no_bubble_and_no_timeline() -> None:
    prediction = predict(job(GPT, training={"global_batch": 16}, dp=2))
    step = simulated_step(prediction)
    assert (step.bubble_seconds, step.timeline) == (0.0, None)
    assert step.step_seconds == pytest.approx(prediction.step_seconds)


@pytest.mark.parametrize("microbatches", [1, 3, 16, 500])
def test_gpipe_with_a_slower_last_stage_equals_the_closed_form(microbatches: int) -> None:
    """Both halves run at the pace of the last stage: m times the slowest, and the others once."""
    prediction = predict(pipelined("gpipe", microbatches=microbatches))
    assert simulated_step(prediction).pipeline_seconds == pytest.approx(prediction.pipeline_seconds, rel=1e-9)


@settings(max_examples=examples(80), deadline=None)
@given(
    schedule=st.sampled_from(sorted(set(SCHEDULES) - set(TWO_CHUNKS))),
    pp=st.sampled_from((2, 4, 8)),
    microbatches=st.sampled_from((1, 2, 8, 16, 17, 64, 301)),
    passes=st.tuples(*[st.sampled_from((0.25, 0.5, 1.0, 1.3))] * 3),
)
def test_equal_ranks_equal_the_closed_form_where_it_is_exact(
    schedule: str, pp: int, microbatches: int, passes: tuple[float, float, float]
) -> None:
    case = pipelined(schedule, pp, microbatches)
    ends = case.stack.step_ends
    if not bubble_is_exact(schedule, pp, microbatches, *passes, ends=ends):
        return
    real = predict(case)
    ranks = tuple(FixedRank(case, rank.contents, Seconds(*passes)) for rank in real.ranks)
    step = simulated_step(Prediction(case, ranks, real.counts))  # type: ignore[arg-type]
    bubble = bubble_seconds(schedule, pp, microbatches, None, *passes, ends=ends)
    assert step.bubble_seconds == pytest.approx(bubble, abs=1e-9 * step.pipeline_seconds)


def test_messages_are_those_between_stages() -> None:
    """The embedding's gradients of both ends are no message of a microbatch."""
    prediction = predict(pipelined("1f1b"))
    messages = [t for t in prediction.slowest.traffics if t.dimension == "pp"]
    assert {t.what for t in messages} >= {"activations, forward", "embedding gradients of both ends"}
    small = min(float(t.cost.seconds) for t in messages)
    assert prediction.slowest.message_seconds == small > 0
    slow = replace(prediction.job.cluster.levels[0], bandwidth=1e6, latency=1e-3)
    slower = replace(prediction.job, cluster=replace(prediction.job.cluster, levels=(slow,)))
    assert simulated_step(predict(slower)).bubble_seconds > simulated_step(prediction).bubble_seconds


@pytest.mark.quick(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_microbatches_are_extrapolated_and_equal_the_whole(schedule: str) -> None:
    prediction = predict(pipelined(schedule, 4, 600, model="llama3-8b"))
    step, whole = simulated_step(prediction), simulated_step(prediction, whole=True)
    assert whole.timeline is not None
    assert (step.timeline is None) == (schedule not in ("zb-1p", "zb-2p"))
    assert step.pipeline_seconds == pytest.approx(whole.pipeline_seconds, rel=1e-9)


def test_sixteen_times_the_microbatches_take_less_than_twice_the_calls() -> None:
    fields = {"tp": 8, "pp": 8, "dp": 8, "schedule": "interleaved", "interleave": 5, "zero": 1}  # 40 stages
    some, more = (
        predict(job("llama3-70b", "dgx-h100:64", {"global_batch": 8 * count, "seq": 8192}, **fields))
        for count in (512, 8192)
    )
    assert calls_of(lambda: simulated_step(more)) < 2 * calls_of(lambda: simulated_step(some))


@pytest.mark.parametrize("changes", [{"peak": {"bf16": 1e-30}}, {"memory_bandwidth": 1e-12}])
def test_rounding_makes_no_part_of_a_step_negative(changes: dict[str, Any]) -> None:
    slow = pipelined("1f1b")
    slow = replace(slow, cluster=replace(slow.cluster, device=replace(slow.cluster.device, **changes)))
    for one in (slow, pipelined("1f1b", microbatches=1), pipelined("gpipe")):
        assert min(step_parts(simulated_step(predict(one))).values()) >= 0
