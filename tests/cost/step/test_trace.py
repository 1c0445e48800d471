"""The trace of a step: it ends when the simulated step ends, and shows all that the step waits for."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from cost.builders import GPT, MOE, job, switched
from cost.jobs import HOST, valid_jobs
from effort import examples
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import rank_predictions, simulated_step
from shardwise.cost.step.trace import step_trace
from shardwise.spec.job import Job

Event = dict[str, Any]


def slices(trace: dict[str, Any]) -> dict[int, list[Event]]:
    """Complete events of every process."""
    own: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            own[event["pid"]].append(event)
    return own


def span(events: list[Event]) -> float:
    return (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e6


def total(events: list[Event], category: str, word: str) -> float:
    return sum(e["dur"] for e in events if e["cat"] == category and word in e["name"]) / 1e6


@settings(max_examples=examples(120), deadline=None)
@given(case=valid_jobs())
def test_the_longest_rank_takes_the_step(case: Job) -> None:
    step = simulated_step(predict(case), whole=True)
    trace = step_trace(case)
    own = slices(trace)
    (whole,) = own.pop(case.strategy.pp)
    assert whole["dur"] / 1e6 == pytest.approx(step.step_seconds, rel=1e-6)
    assert trace["otherData"]["step_seconds"] == pytest.approx(step.step_seconds, rel=1e-6)
    assert set(own) == set(range(case.strategy.pp))
    assert max(map(span, own.values())) == pytest.approx(step.step_seconds, rel=1e-6)
    if step.timeline is None or step.timeline.makespan_seconds == step.timeline.longest_rank_seconds:
        end = max(e["ts"] + e["dur"] for events in own.values() for e in events)
        assert end / 1e6 == pytest.approx(step.step_seconds, rel=1e-6)


@settings(max_examples=examples(120), deadline=None)
@given(case=valid_jobs())
def test_all_that_is_waited_for_is_drawn(case: Job) -> None:
    prediction = predict(case)
    own = slices(step_trace(case))
    m = case.microbatches
    for number, rank in enumerate(rank_predictions(prediction)):
        events = own[number]
        if case.strategy.schedule != "dualpipe":  # there a rank also runs its mirror's stage
            waited = m * (rank.microbatch_seconds - rank.compute.total)
            drawn = sum(total(events, name, ", exposed") for name in ("tp", "cp", "ep"))
            once = sum(t.exposed_seconds for t in rank.traffics if t.once and t.dimension in ("tp", "cp", "ep"))
            assert drawn - once == pytest.approx(waited, rel=1e-6, abs=1e-9)
            assert total(events, "compute", "recompute") == pytest.approx(m * rank.compute.recomputed)
        for name in ("dp", "offload"):
            assert total(events, name, "exposed") == pytest.approx(rank.exposed(name), rel=1e-6, abs=1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(case=valid_jobs())
def test_slices_of_a_thread_nest_or_follow_each_other(case: Job) -> None:
    """Viewers lose a slice that begins inside another and outlasts it."""
    for events in slices(step_trace(case)).values():
        threads: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            threads[event["tid"]].append(event)
        for own in threads.values():
            open_until: list[float] = []
            for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                while open_until and open_until[-1] <= event["ts"] + 1e-3:
                    open_until.pop()
                end = event["ts"] + event["dur"]
                assert not open_until or end <= open_until[-1] * (1 + 1e-9) + 1e-3
                open_until.append(end)


def test_threads_are_named_and_messages_say_where_they_go() -> None:
    case = job(GPT, training={"global_batch": 8}, dp=2, pp=4, tp=2, zero=1)
    trace = step_trace(case)
    names = {
        (e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["name"].endswith("_name")
    }
    assert {(0, "pipeline rank 0 of 4"), (0, "compute"), (0, "tp"), (0, "pp"), (0, "dp"), (4, "step")} <= names
    sent = [e["name"] for e in slices(trace)[1] if e["cat"] == "pp" and " to " in e["name"]]
    assert sent.count("F0 to rank 2") == sent.count("B0 to rank 0") == 1
    assert len(sent) == 2 * case.microbatches
    json.dumps(trace, allow_nan=False)


def test_the_last_backward_hides_the_reduction_and_the_rest_follows() -> None:
    case = job(GPT, "dgx-h100:2", training={"global_batch": 32}, dp=16, zero=1)
    events = slices(step_trace(case))[0]
    last = max((e for e in events if e["cat"] == "backward"), key=lambda e: e["ts"])
    end = last["ts"] + last["dur"]
    (hidden,) = [e for e in events if e["name"] == "gradients, backward, hidden"]
    (exposed,) = [e for e in events if e["name"] == "gradients, backward, exposed"]
    (optimizer,) = [e for e in events if e["name"] == "optimizer"]
    assert hidden["ts"] + hidden["dur"] == pytest.approx(end)
    assert exposed["ts"] == pytest.approx(end)
    assert optimizer["ts"] == pytest.approx(exposed["ts"] + exposed["dur"])


def test_experts_and_offload_have_threads_of_their_own() -> None:
    cluster = switched(4, 4, **HOST)
    fields = {"dp": 8, "pp": 2, "ep": 4, "offload": {"activations": 0.5, "optimizer": 1}}
    case = job(MOE, cluster, training={"global_batch": 32}, **fields)
    categories = {e["cat"] for e in slices(step_trace(case))[0]}
    assert {"ep", "offload", "pp", "dp"} <= categories


def test_of_very_many_ranks_the_ends_and_the_middle_are_shown() -> None:
    deep = type(GPT).from_dict({**GPT.to_dict(), "layers": 72})
    case = job(deep, training={"global_batch": 2}, dp=1, pp=72)
    assert set(slices(step_trace(case))) == {0, 1, 36, 70, 71, 72}
