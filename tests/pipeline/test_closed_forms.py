"""Formulas equal the simulator wherever they say that they are exact, and come near it elsewhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.pipeline import (
    EqualStages,
    bubble_is_exact,
    bubble_seconds,
    build,
    chunks_per_rank,
    equal_stages,
    peak_activations,
    peak_chunks_in_flight,
    simulate,
)
from shardwise.pipeline.forms import messages_per_link
from shardwise.pipeline.schedule import verify
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import imported, schedule_record

NAMES = (
    "sequential", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zbv", "v-half", "v-min",
    "dualpipe", "dualpipev",
)  # fmt: skip
ANY_TIMES = ("sequential", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
seconds = st.integers(1, 12).map(lambda n: n / 4)


@st.composite
def pipelines(draw, names=NAMES):
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    chunks = None
    if name == "dualpipe":
        ranks += ranks % 2 and ranks > 1
    if name == "interleaved":
        chunks = draw(st.integers(1, 4))
        microbatches = ranks * draw(st.integers(1, 4))
    return name, ranks, microbatches, chunks


def simulated_bubble(name, ranks, microbatches, chunks, times, comm=0.0):
    schedule = build(name, ranks, microbatches, chunks)
    return simulate(schedule, equal_stages(schedule.stages, *times), comm).bubble_seconds


@settings(max_examples=examples(250), deadline=None)
@given(pipeline=pipelines(ANY_TIMES), times=st.tuples(seconds, seconds, seconds))
def test_bubbles_with_any_times(pipeline, times):
    name, ranks, microbatches, _ = pipeline
    if bubble_is_exact(name, ranks, microbatches, *times):
        expected = simulated_bubble(*pipeline, times)
        assert bubble_seconds(*pipeline, *times) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=examples(250), deadline=None)
@given(
    pipeline=pipelines(ANY_TIMES),
    times=st.tuples(seconds, seconds, seconds),
    comm=st.sampled_from([0.01, 0.05, 0.2, 1.0, 4.0]),
)
def test_bubbles_with_messages(pipeline, times, comm):
    name, ranks, microbatches, _ = pipeline
    if bubble_is_exact(name, ranks, microbatches, *times, comm):
        expected = simulated_bubble(*pipeline, times, comm)
        assert bubble_seconds(*pipeline, *times, comm) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=examples(150), deadline=None)
@given(pipeline=pipelines(ANY_TIMES), times=st.tuples(seconds, seconds, seconds))
def test_ranks_that_end_a_step_together(pipeline, times):
    """They wait for the last of them, which is not the longest where a schedule is skewed over the ranks."""
    name, ranks, microbatches, _ = pipeline
    schedule = build(*pipeline)
    timeline = simulate(schedule, equal_stages(schedule.stages, *times))
    together = bubble_seconds(*pipeline, *times, ends="together")
    assert together >= bubble_seconds(*pipeline, *times) - 1e-9
    if bubble_is_exact(name, ranks, microbatches, *times, ends="together"):
        assert together == pytest.approx(timeline.idle_seconds("together"), abs=1e-9)


@pytest.mark.parametrize("name", ["zb-h2", "zb-2p", "zbv"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 7), (4, 12), (8, 16), (8, 40)])
def test_skewed_schedules_wait_for_the_first_forward_pass(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches)
    timeline = simulate(schedule, equal_stages(schedule.stages))
    assert timeline.idle_seconds("apart") == pytest.approx(0.0)
    assert timeline.idle_seconds("together") == pytest.approx(ranks - 1)
    assert bubble_seconds(name, ranks, microbatches, ends="together") == pytest.approx(ranks - 1)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("passes", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8)])
def test_a_pipeline_that_never_fills_runs_as_priced(name, passes):
    """No weight gradient waits where there is nothing else to run: at pp 8 zb-h2 took 10 units too long, not 7."""
    for ranks in range(2, 9):
        for microbatches in range(1, 2 * ranks - 1):
            timeline = simulate(build(name, ranks, microbatches), equal_stages(ranks, *passes))
            for ends in ("apart", "together"):
                form = bubble_seconds(name, ranks, microbatches, None, *passes, ends=ends)
                assert form == pytest.approx(timeline.idle_seconds(ends)), (ranks, microbatches, ends)


@pytest.mark.parametrize("name", ["zb-h2", "zbv"])
@pytest.mark.parametrize("passes", [(1.0, 1.2, 0.8), (1.0, 1.0, 1.0), (1.0, 0.5, 0.5)])
@pytest.mark.parametrize("comm", [0.0, 0.02, 0.2])
def test_a_full_skewed_pipeline_with_messages(name, passes, comm):
    schedule = build(name, 4, 12)
    timeline = simulate(schedule, equal_stages(schedule.stages, *passes), comm)
    form = bubble_seconds(name, 4, 12, None, *passes, comm, ends="together")
    assert form == pytest.approx(timeline.idle_seconds("together"), abs=0.025 * timeline.makespan_seconds)


def busiest_link_messages(schedule):
    """Counted: what goes over the link with most of them, from one rank to another."""
    sent = Counter()
    for rank, actions in enumerate(schedule.actions):
        for kind, stage, j in actions:
            target = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= target < schedule.stages and (other := schedule.rank_of(target, j)) != rank:
                sent[rank, other] += 1
    return max(sent.values(), default=0)


@settings(max_examples=examples(200), deadline=None)
@given(
    pipeline=pipelines(),
    times=st.tuples(seconds, seconds, seconds),
    comm=st.sampled_from([0.05, 0.5, 1.0, 2.0, 4.0, 10.0, 40.0, 400.0]),
)
def test_no_step_is_shorter_than_what_its_links_carry(pipeline, times, comm):
    name, ranks, microbatches, _ = pipeline
    schedule = build(*pipeline)
    messages = busiest_link_messages(schedule)
    per_microbatch = messages_per_link(name, ranks, schedule.stages // ranks) if ranks > 1 else 0
    assert per_microbatch * microbatches == messages or (name == "dualpipe" and microbatches % 2)
    step = microbatches * schedule.stages / ranks * sum(times) + bubble_seconds(*pipeline, *times, comm)
    assert step >= messages * comm


@settings(max_examples=examples(300), deadline=None)
@given(
    pipeline=pipelines(),
    passes=st.sampled_from([(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0)]),
    comm=st.sampled_from([1.0, 2.0, 3.0, 5.0, 10.0, 40.0, 400.0]),
)
@example(pipeline=("v-min", 2, 8, None), passes=(1.0, 1.0, 1.0), comm=400.0)
def test_steps_with_long_messages_come_near(pipeline, passes, comm):
    """Within 35 % of the simulated step, and 10 % where messages are all that counts, once a pipeline is full."""
    _, ranks, microbatches, _ = pipeline
    if microbatches < 2 * ranks:
        return
    schedule = build(*pipeline)
    work = microbatches * schedule.stages / ranks * sum(passes)
    simulated = work + simulated_bubble(*pipeline, passes, comm)
    near = 0.1 if comm > 100 and microbatches >= 4 * ranks else 0.35
    assert work + bubble_seconds(*pipeline, *passes, comm) == pytest.approx(simulated, rel=near)


@settings(max_examples=examples(200), deadline=None)
@given(pipeline=pipelines(), times=st.tuples(seconds, seconds, seconds), share=st.sampled_from([0.0, 0.1, 0.5]))
def test_links_do_not_matter_while_messages_are_short(pipeline, times, share):
    """Half of the shortest pass: the pace is that of the passes."""
    name, ranks, microbatches, _ = pipeline
    if microbatches < ranks:
        return
    v, comm = build(*pipeline).stages // ranks, share * min(times)
    passes_alone = imported(schedule_record(name).closed_forms).bubble(
        EqualStages(ranks, microbatches, v, *times, comm)
    )
    assert bubble_seconds(*pipeline, *times, comm) == pytest.approx(passes_alone, abs=1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(pipeline=pipelines())
def test_bubbles_with_equal_passes(pipeline):
    name, ranks, microbatches, _ = pipeline
    if bubble_is_exact(name, ranks, microbatches):
        assert bubble_seconds(*pipeline) == pytest.approx(simulated_bubble(*pipeline, (1, 1, 1)), abs=1e-9)


def test_where_forms_claim_to_be_exact():
    """The property tests above must not be empty."""
    for name in ANY_TIMES:
        assert bubble_is_exact(name, 8, 32, 2.0, 3.0, 1.0)
        assert bubble_is_exact(name, 8, 32, 2.0, 3.0, 1.0, 0.05)
    for name in ("zbv", "v-half", "v-min", "dualpipe", "dualpipev"):
        assert bubble_is_exact(name, 8, 32)
    assert not bubble_is_exact("zb-h1", 8, 4, 1.0, 1.0, 2.0)
    assert not bubble_is_exact("zb-2p", 8, 32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", 7 * 3.0),
        ("1f1b", 7 * 3.0),
        ("zb-h1", 7 * 1.0),
        ("zb-h2", 0.0),
        ("zbv", 0.0),
        ("v-half", 7 * 6.0 / 2 - 4),  # half of 1F1B's on two chunks, and 4 less
        ("dualpipe", 3.0),
    ],
)
def test_published_forms(name, expected):
    assert bubble_seconds(name, 8, 32) == pytest.approx(expected)


def test_unequal_passes_stay_near_where_only_an_estimate():
    """Realistic times (6.2B of the zero-bubble paper): within 1 % of the step."""
    times, comm = (29.7, 29.4, 19.9), 0.53
    for name in ("zb-1p", "zb-2p", "zbv", "v-half", "v-min", "dualpipe", "dualpipev"):
        v = chunks_per_rank(name)
        chunk = tuple(t / v for t in times)
        schedule = build(name, 8, 32, times=equal_stages(8 * v, *chunk), comm_seconds=comm)
        simulated = simulate(schedule, equal_stages(8 * v, *chunk), comm).bubble_seconds
        assert bubble_seconds(name, 8, 32, None, *chunk, comm) == pytest.approx(simulated, abs=0.01 * 32 * sum(times))


def test_forms_take_arrays():
    p, m, w = np.array([1, 2, 8]), np.array([4, 8, 32]), np.array([0.5, 1.0, 1.0])
    for name in NAMES:
        got = bubble_seconds(name, p, m, 3 if name == "interleaved" else None, 2.0, 1.5, w, 0.01)
        alone = [
            bubble_seconds(name, int(a), int(b), 3 if name == "interleaved" else None, 2.0, 1.5, float(c), 0.01)
            for a, b, c in zip(p, m, w)
        ]
        assert np.allclose(np.broadcast_to(got, 3), alone)


def test_automatic_schedules_have_no_form():
    with pytest.raises(SpecError, match="memory_limit"):
        bubble_seconds("zb-auto", 4, 8)
    with pytest.raises(SpecError, match="not a pipeline schedule"):
        bubble_seconds("zb-h3", 4, 8)


@settings(max_examples=examples(200), deadline=None)
@given(pipeline=pipelines())
def test_peaks_equal_the_schedule(pipeline):
    name, ranks = pipeline[:2]
    for ahead in {0, schedule_record(name).ahead_of_exchange}:
        schedule = build(*pipeline, ahead=ahead)
        verify(schedule)
        peaks = list(map(round, peak_activations(schedule)))
        assert [peak_chunks_in_flight(*pipeline, rank, ahead) for rank in range(ranks)] == peaks


@pytest.mark.parametrize("name", ["zbv", "zb-1p", "zb-2p"])
def test_times_never_raise_a_peak(name):
    v = chunks_per_rank(name)
    for times in ((3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0), (2.0, 2.2, 1.1)):
        schedule = build(name, 6, 24, times=equal_stages(6 * v, *times), comm_seconds=0.2)
        limit = max(peak_chunks_in_flight(name, 6, 24, None, rank) for rank in range(6))
        assert max(peak_activations(schedule)) <= limit


def test_published_peaks():
    def peaks(name, v=None):
        return [peak_chunks_in_flight(name, 8, 64, v, rank) for rank in range(8)]

    assert peaks("gpipe") == [64] * 8
    assert peaks("1f1b") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert peaks("interleaved", 2) == [23, 21, 19, 17, 15, 13, 11, 9]
    assert peaks("zb-h1") == [8] * 8
    assert peaks("zb-h2") == [15] * 8
    assert peaks("zb-2p") == [16] * 8
    assert peaks("zbv") == [16] * 8
    assert peaks("v-half") == [10] * 8
    assert peaks("dualpipe") == [9] * 8
    assert peaks("dualpipev") == [17] * 8


def test_peaks_of_ranks_that_are_not_there():
    with pytest.raises(SpecError, match="not one of the 4"):
        peak_chunks_in_flight("1f1b", 4, 8, None, 4)
    with pytest.raises(SpecError, match="memory_limit"):
        peak_chunks_in_flight("zb-auto", 4, 8, None, 0)
