"""The text drawing and the trace events of a timeline."""

from __future__ import annotations

import json

import pytest

from shardwise.pipeline import build, draw_timeline, equal_stages, simulate, trace_events


def test_a_small_timeline_in_text():
    timeline = simulate(build("1f1b", 2, 3), equal_stages(2, 1.0, 1.0, 1.0))
    assert draw_timeline(timeline).splitlines() == [
        "1f1b: 2 ranks, 3 microbatches, 12 s, bubble 25.0%",
        "0 F0-F1-......B0----F2-B1----...B2----",
        "1 ...F0-B0----F1-B1----F2-B2----......",
    ]


def test_later_stages_are_in_small_letters():
    text = draw_timeline(simulate(build("zbv", 2, 3), equal_stages(4)))
    assert text.splitlines()[1].startswith("0 F0-F1-F2-f0-i0-w0-")


@pytest.mark.parametrize("name", ["gpipe", "zb-h2", "dualpipe", "v-min"])
def test_rows_have_one_width_and_never_pass_the_limit(name):
    schedule = build(name, 4, 12)
    rows = draw_timeline(simulate(schedule, equal_stages(schedule.stages, 1.0, 1.3, 0.7), 0.1), 100).splitlines()[1:]
    assert len(rows) == 4
    assert {len(row) for row in rows} == {102}


def test_idle_dots_stand_for_idle_time():
    timeline = simulate(build("gpipe", 4, 4), equal_stages(4, 1.0, 1.0, 1.0))
    row = draw_timeline(timeline).splitlines()[1]
    assert row.count(".") / len(row.split()[1]) == pytest.approx(1 - timeline.busy[0] / timeline.makespan_seconds)


def test_trace_events_are_plain_and_complete():
    timeline = simulate(build("zb-h1", 3, 4), equal_stages(3, 0.5, 0.5, 0.5), 0.1)
    events = json.loads(json.dumps(trace_events(timeline)))
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 3 * 4 * 3
    assert sum(event["dur"] for event in slices) == pytest.approx(3 * 4 * 1.5e6)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan_seconds * 1e6)
    assert {event["tid"] for event in slices} == {0, 1, 2}
    counters = [event for event in events if event["ph"] == "C"]
    assert max(event["args"]["held"] for event in counters) == 3
