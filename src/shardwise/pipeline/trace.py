"""A timeline as Chrome trace events (Perfetto and chrome://tracing read them), as plain data."""

from __future__ import annotations

from typing import Any

from shardwise.pipeline.activations import live_activations
from shardwise.pipeline.schedule import ActionKind
from shardwise.pipeline.timeline import Timeline

_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}
_COLOURS = {ActionKind.F: "good", ActionKind.B: "bad", ActionKind.I: "bad", ActionKind.W: "yellow"}


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """A thread per rank with a slice per action, and a counter of the activations it holds; microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": timeline.schedule.name}}
    ]
    for rank, actions in enumerate(timeline.schedule.actions):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank]):
            events.append(
                {
                    "ph": "X",
                    "name": f"{action.kind}{action.microbatch}",
                    "cat": _NAMES[action.kind],
                    "cname": _COLOURS[action.kind],
                    "pid": 0,
                    "tid": rank,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    for rank, steps in enumerate(live_activations(timeline)):
        counter = {"ph": "C", "name": f"activations of rank {rank}", "pid": 0, "tid": rank}
        events += [{**counter, "ts": at * 1e6, "args": {"held": held}} for at, held in steps]
    return events
