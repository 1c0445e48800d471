"""Seconds of many microbatches from the simulation of few: equal to the simulation of all, whatever the times."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import calls_of, examples
from shardwise.pipeline import bubble_is_exact, bubble_seconds, build, chunks_per_rank, equal_stages, simulate, steady
from shardwise.pipeline.schedule import StageTimes, stage_times
from shardwise.pipeline.steady import repetition, simulated_pipeline

EXTRAPOLATED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe", "dualpipev")
MANY = st.integers(9, 40)
EXACT = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")


@pytest.fixture(autouse=True)
def extrapolate_always(monkeypatch):
    monkeypatch.setattr(steady, "_FEW_ACTIONS", 0)


@st.composite
def pipelines(draw, names=EXTRAPOLATED, rounds=MANY):
    """Name, ranks, microbatches (many for the ranks), chunks."""
    name, ranks = draw(st.sampled_from(names)), draw(st.integers(2, 6))
    if name == "dualpipe":
        ranks += ranks % 2
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else chunks_per_rank(name)
    more = 0 if name == "interleaved" else draw(st.integers(0, ranks - 1))
    return name, ranks, ranks * draw(rounds) + more, chunks


def columns(stages: int, seconds: st.SearchStrategy[float]) -> st.SearchStrategy[StageTimes]:
    one = st.lists(seconds, min_size=stages, max_size=stages)
    return st.tuples(one, one, one).map(lambda three: stage_times(*three))


def any_times(stages: int) -> st.SearchStrategy[StageTimes]:
    """Equal stages, as in a real model but for its ends, a few whole numbers, nearly equal, or anything."""
    seconds = st.floats(0.2, 2.0)
    equal = st.tuples(seconds, seconds, seconds).map(lambda three: equal_stages(stages, *three))
    middle = st.tuples(equal, st.floats(0.9, 1.5)).map(lambda given: slower_last(*given))
    whole = columns(stages, st.integers(1, 4).map(float))
    return st.one_of(equal, middle, whole, columns(stages, st.floats(1.0, 1.001)), columns(stages, seconds))


def slower_last(times: StageTimes, factor: float) -> StageTimes:
    return stage_times(*([*own[:-1], own[-1] * factor] for own in (times.forward, times.input_grad, times.weight_grad)))


@settings(max_examples=examples(250), deadline=None)
@given(pipeline=pipelines(), data=st.data(), message=st.sampled_from((0.0, 0.01, 0.3, 2.0, 20.0)))
def test_extrapolation_equals_the_whole_simulation(pipeline, data, message):
    times, ends = data.draw(any_times(pipeline[1] * pipeline[3])), data.draw(st.sampled_from(("apart", "together")))
    seconds, timeline = simulated_pipeline(*pipeline, times, message, ends=ends)
    expected, whole = simulated_pipeline(*pipeline, times, message, ends=ends, whole=True)
    assert whole is not None
    assert seconds == pytest.approx(expected, rel=1e-9)
    if timeline is None:
        assert seconds == pytest.approx(expected, rel=1e-14)  # sums are exact, but for the last rounding


@settings(max_examples=examples(60), deadline=None)
@given(pipeline=pipelines(), message=st.sampled_from((0.0, 0.05)), factor=st.sampled_from((1.0, 1.25)))
def test_it_is_used_where_stages_are_as_in_a_model(pipeline, message, factor):
    """Else the test above would prove nothing: equal stages, the last one with the loss.

    With a last stage of 1.2 times the others two chains of v-min are equally long but for the rounding of their times.
    """
    times = slower_last(equal_stages(pipeline[1] * pipeline[3], 1.0, 1.1, 0.9), factor)
    _, timeline = simulated_pipeline(*pipeline[:2], 48 * pipeline[1], pipeline[3], times, message, ends="apart")
    assert timeline is None


@settings(max_examples=examples(100), deadline=None)
@given(pipeline=pipelines(rounds=st.integers(1, 6)), data=st.data(), message=st.sampled_from((0.0, 0.01, 0.3)))
def test_rounding_the_times_changes_next_to_nothing(pipeline, data, message):
    name, ranks, microbatches, chunks = pipeline
    times = data.draw(any_times(ranks * chunks))
    plain = simulate(build(name, ranks, microbatches, chunks), times, message).longest_rank_seconds
    assert simulated_pipeline(*pipeline, times, message, ends="apart")[0] == pytest.approx(plain, rel=1e-10)


@settings(max_examples=examples(150), deadline=None)
@given(
    pipeline=pipelines(EXACT, st.integers(1, 40)),
    passes=st.tuples(*[st.integers(1, 12).map(lambda n: n / 7)] * 3),
    message=st.sampled_from((0.0, 0.01, 0.1, 4.0)),
)
@example(pipeline=("1f1b", 8, 4096, 1), passes=(1.0, 1.0, 1.0), message=0.1)
def test_it_equals_the_closed_form_where_that_is_exact(pipeline, passes, message):
    name, ranks, microbatches, chunks = pipeline
    if not bubble_is_exact(name, ranks, microbatches, *passes, message):
        return
    seconds, _ = simulated_pipeline(*pipeline, equal_stages(ranks * chunks, *passes), message, ends="apart")
    bubble = bubble_seconds(name, ranks, microbatches, chunks, *passes, message)
    assert seconds == pytest.approx(microbatches * chunks * sum(passes) + bubble, rel=1e-9)


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("microbatches", [16, 17, 500, 501])
def test_folded_schedules_equal_their_closed_form_for_equal_passes(name, microbatches):
    if name == "dualpipe":
        microbatches += microbatches % 2
    chunks = chunks_per_rank(name)
    seconds, _ = simulated_pipeline(name, 8, microbatches, chunks, equal_stages(8 * chunks), ends="apart")
    assert bubble_is_exact(name, 8, microbatches)
    assert seconds == pytest.approx(3 * microbatches * chunks + bubble_seconds(name, 8, microbatches))


def test_a_period_is_found_and_is_the_shortest():
    """Two ranks that wait for messages go round once in two microbatches."""
    alone, waiting = (simulate(build("1f1b", 2, 32), equal_stages(2), message) for message in (0.0, 1.0))
    assert repetition(alone) == (1, 3.0)
    assert repetition(waiting) == (2, 8.0)


def test_a_slow_stage_that_shows_late_is_not_missed():
    """The second stage is slower by a millionth: it takes long until the pipeline runs at its pace."""
    times = stage_times([1.0, 1.0, 1.0, 1.0], [1.0, 1.000001, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    for name in ("1f1b", "zb-h1", "zb-h2"):
        seconds, _ = simulated_pipeline(name, 4, 600, 1, times, 0.2, ends="apart")
        assert seconds == pytest.approx(
            simulated_pipeline(name, 4, 600, 1, times, 0.2, whole=True, ends="apart")[0], rel=1e-12
        )


def test_too_few_microbatches_never_repeat():
    assert repetition(simulate(build("1f1b", 8, 8), equal_stages(8))) is None
    assert simulated_pipeline("1f1b", 8, 8, 1, equal_stages(8), ends="apart")[1] is not None


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_what_takes_the_best_of_several_orders_is_simulated_whole(name):
    assert simulated_pipeline(name, 3, 60, 1, equal_stages(3), ends="apart")[1] is not None


def test_a_pipeline_without_work_takes_no_time():
    assert simulated_pipeline("1f1b", 4, 100, 1, equal_stages(4, 0.0, 0.0, 0.0), ends="apart")[0] == 0.0


def test_sixteen_times_the_microbatches_take_less_than_twice_the_calls():
    times = slower_last(equal_stages(16, 1.0, 1.1, 0.9), 1.2)

    def simulated(microbatches):
        assert simulated_pipeline("interleaved", 8, microbatches, 2, times, 0.01, ends="apart")[1] is None

    assert calls_of(lambda: simulated(16_384)) < 2 * calls_of(lambda: simulated(1024))
