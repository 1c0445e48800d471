"""The predicted step and the measured ones in one Chrome trace (ui.perfetto.dev and chrome://tracing read it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.cost.step.trace import step_trace
from shardwise.engine.labels import label_of
from shardwise.measure.compare.step_parts import Measured
from shardwise.run.profile import HOST, STREAMS, NamedRange, RankRecord
from shardwise.spec.job import Job

_MEASURED = 100_000  # process numbers from here on are measured ranks


def timeline(job: Job, recorded: Measured) -> dict[str, Any]:
    """Both begin at 0: the prediction, and the first measured step of the rank that begins first."""
    trace = step_trace(job)
    events = [_predicted(event) for event in trace["traceEvents"]]
    zero = min(steps[0].start for steps in recorded.steps)
    for record in recorded.records:
        events += _rank(record, zero)
    return {**trace, "traceEvents": events}


def _predicted(event: dict[str, Any]) -> dict[str, Any]:
    if event["ph"] == "M" and event["name"] == "process_name":
        return {**event, "args": {"name": f"predicted: {event['args']['name']}"}}
    return event


def _rank(record: RankRecord, zero: float) -> Iterator[dict[str, Any]]:
    process = _MEASURED + record.rank
    named = {"ph": "M", "pid": process}
    yield {**named, "name": "process_name", "args": {"name": f"measured: rank {record.rank}, node {record.node}"}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": process}}
    lanes = dict.fromkeys(named.lane for named in record.ranges)
    for lane in lanes:
        yield {**named, "name": "thread_name", "tid": lane, "args": {"name": _lane_name(lane)}}
    yield from (_event(process, named, zero) for named in record.ranges)


def _lane_name(lane: int) -> str:
    if lane == HOST:
        return "training thread"
    return f"backend {lane}" if lane < STREAMS else f"stream {lane - STREAMS}"


def _event(process: int, named: NamedRange, zero: float) -> dict[str, Any]:
    label = label_of(named.name)
    return {
        "ph": "X",
        "name": named.name,
        "cat": label.part or label.kind,
        "pid": process,
        "tid": named.lane,
        "ts": (named.start - zero) * 1e6,
        "dur": named.seconds * 1e6,
        "args": {"bytes": label.bytes} if label.bytes else {},
    }
