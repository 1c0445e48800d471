"""The predicted step of a job as a Chrome trace (for ui.perfetto.dev or chrome://tracing).

A process per pipeline rank, with a thread for computation and one per dimension that communicates. Passes and messages
are where the simulation puts them. Within a pass the communication of all layers is drawn together: overlapped from the
start of the pass, exposed at its end. After the last pass comes what the step waits for once: reductions, the
optimizer, parameters for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.cost.step.prediction import Prediction, RankPrediction, predict
from shardwise.cost.step.simulation import pipeline_times, rank_predictions, step_timeline
from shardwise.cost.step.stage_time import optimizer_seconds
from shardwise.layout.payloads import PASSES, Pass
from shardwise.layout.sharding import sharding_of
from shardwise.pipeline import Action, ActionKind, PipelineSchedule, StageTimes, Timeline, trace_events
from shardwise.spec.job import Job

_MOST_RANKS = 64
_COMPUTE = "compute"
_THREADS = (_COMPUTE, "tp", "cp", "ep", "pp", "dp", "offload")
_LANES = 100  # thread numbers of a dimension, for what it does at the same time
_PER_STEP = ("dp", "offload")
_ROUNDING = 1e-12  # seconds


@dataclass(frozen=True)
class _Slice:
    """An interval on one thread of a pipeline rank."""

    thread: str
    name: str
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


def step_trace(job: Job) -> dict[str, Any]:
    """One step in the Chrome JSON format; times in microseconds from the step's start."""
    prediction = predict(job)
    timeline, ranks = step_timeline(prediction), rank_predictions(prediction)
    times = pipeline_times(prediction)
    seconds = timeline.step_seconds(job.stack.step_ends) + prediction.tail_seconds
    end = timeline.makespan_seconds if job.stack.step_ends == "together" else None
    step = job.strategy.pp  # the process after those of the ranks
    events = [*_named(step, "step", -1, {0: "step"}), _event(step, 0, _Slice(_COMPUTE, "step", 0.0, seconds))]
    passes = _pass_events(timeline)
    pp = job.strategy.pp
    # All of them; if they are very many, the ends and the middle.
    for number in range(pp) if pp <= _MOST_RANKS else (0, 1, pp // 2, pp - 2, pp - 1):
        slices = [
            *_inside_passes(timeline, number, ranks, times),
            *_messages(timeline, number, prediction.slowest.message_seconds),
            *_under_passes(timeline, number, ranks[number]),
            *_tail(prediction, ranks[number], end or timeline.ends[number][-1]),
        ]
        lasting = [interval for interval in slices if interval.seconds > 0]
        events += passes[number] + _rank_events(number, job.strategy.pp, lasting)
    tokens = job.tokens_per_step / seconds
    data = {"model": job.model.name, "cluster": job.cluster.name, "step_seconds": seconds, "tokens_per_second": tokens}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": data}


def _pass_events(timeline: Timeline) -> list[list[dict[str, Any]]]:
    """The pipeline's own events, each rank as the first thread of a process of its own."""
    own: list[list[dict[str, Any]]] = [[] for _ in range(timeline.schedule.ranks)]
    for event in trace_events(timeline):
        if event["ph"] == "X":
            own[event["tid"]].append({**event, "pid": event["tid"], "tid": 0})
        elif event["ph"] == "C":
            rank = event["tid"]
            own[rank].append({**event, "name": "chunks whose activations are held", "pid": rank, "tid": 0})
    return own


def _inside_passes(timeline: Timeline, number: int, ranks: list[RankPrediction], times: StageTimes) -> Iterator[_Slice]:
    """Recompute, and the communication of the layers in every pass."""
    schedule = timeline.schedule
    sent = [{which: _in_layers(rank, which) for which in PASSES} for rank in ranks]
    for action, start, end in zip(schedule.actions[number], timeline.starts[number], timeline.ends[number]):
        if action.kind is ActionKind.W or end == start:
            continue
        holder = schedule.placement[action.stage]  # DualPipe runs every stage on two ranks
        which, share = _pass_of(action, ranks[holder], times)
        if which == "backward":
            yield _Slice(_COMPUTE, "recompute", start, share * ranks[holder].compute.recomputed)
        label = f"{action.kind}{action.microbatch}"
        waits = end - share * sum(exposed for _, exposed in sent[holder][which].values())
        for name, (hidden, exposed) in sent[holder][which].items():
            yield _Slice(name, f"{label}, hidden", start, share * hidden)
            yield _Slice(name, f"{label}, exposed", waits, share * exposed)
            waits += share * exposed


def _pass_of(action: Action, rank: RankPrediction, times: StageTimes) -> tuple[Pass, float]:
    """The pass that an action belongs to, and the share of its stage in that pass of the rank."""
    if action.kind is ActionKind.F:
        return "forward", times.forward[action.stage] / rank.passes.forward
    return "backward", times.input_grad[action.stage] / rank.passes.input_gradient


def _in_layers(rank: RankPrediction, which: Pass) -> dict[str, tuple[float, float]]:
    """Hidden and exposed seconds of each dimension in one pass of one microbatch.

    Forward traffic that recompute repeats is part of the backward pass.
    """
    sent: dict[str, tuple[float, float]] = {}
    for traffic in rank.traffics:
        if not traffic.in_layer:
            continue
        in_forward = 1 - traffic.repeated if traffic.in_pass == "forward" else 0.0
        share = (in_forward if which == "forward" else 1 - in_forward) / rank.microbatches
        hidden, exposed = sent.get(traffic.dimension, (0.0, 0.0))
        sent[traffic.dimension] = hidden + share * traffic.hidden_seconds, exposed + share * traffic.added_seconds
    return sent


def _messages(timeline: Timeline, number: int, seconds: float) -> Iterator[_Slice]:
    schedule = timeline.schedule
    for action, arrival in zip(schedule.actions[number], timeline.arrivals[number]):
        target = _receiver(schedule, action)
        if target not in (None, number):
            yield _Slice("pp", f"{action.kind}{action.microbatch} to rank {target}", arrival - seconds, seconds)


def _receiver(schedule: PipelineSchedule, action: Action) -> int | None:
    """The rank that waits for the action's result."""
    stage = action.stage + (1 if action.kind is ActionKind.F else -1)
    if action.kind is ActionKind.W or not 0 <= stage < schedule.stages:
        return None
    return schedule.rank_of(stage, action.microbatch)


def _under_passes(timeline: Timeline, number: int, rank: RankPrediction) -> Iterator[_Slice]:
    """What overlaps with whole passes: reductions with the last backward, gathers with the first or every forward."""
    actions = list(zip(timeline.schedule.actions[number], timeline.starts[number], timeline.ends[number]))
    for traffic in rank.traffics:
        hidden = traffic.hidden_seconds
        if traffic.dimension not in _PER_STEP or not hidden:
            continue
        forward = traffic.in_pass == "forward"
        if traffic.last_only:
            start = timeline.starts[number][0] if forward else max(0.0, timeline.ends[number][-1] - hidden)
            yield _Slice(traffic.dimension, f"{traffic.what}, hidden", start, hidden)
            continue
        under = [(start, end) for action, start, end in actions if (action.kind is ActionKind.F) == forward]
        share = hidden / sum(end - start for start, end in under)
        for start, end in under:
            yield _Slice(traffic.dimension, f"{traffic.what}, hidden", start, share * (end - start))


def _tail(prediction: Prediction, rank: RankPrediction, start_seconds: float) -> Iterator[_Slice]:
    """What the step waits for once, in sequence; ranks with less of it wait for the slowest."""
    job = prediction.job
    per_step = [traffic for traffic in rank.traffics if traffic.dimension in _PER_STEP]
    before = [*(t for t in per_step if t.in_pass == "backward"), *(t for t in rank.traffics if t.once)]
    optimizer = float(optimizer_seconds(job, rank.contents, sharding_of(job.strategy)))
    parts = [
        *((t.dimension, f"{t.what}, exposed", t.added_seconds) for t in before),
        (_COMPUTE, "optimizer", optimizer),
        *((t.dimension, f"{t.what}, exposed", t.added_seconds) for t in per_step if t.in_pass == "forward"),
    ]
    now = start_seconds
    for thread, name, seconds in parts:
        yield _Slice(thread, name, now, seconds)
        now += seconds
    yield _Slice(_COMPUTE, "waits for the slowest rank", now, start_seconds + prediction.tail_seconds - now)


def _rank_events(number: int, ranks: int, slices: list[_Slice]) -> list[dict[str, Any]]:
    """The slices on their threads; those of one dimension that overlap get threads of their own."""
    free_since: dict[str, list[float]] = {name: [] for name in _THREADS}
    threads, events = {0: _COMPUTE}, []
    for interval in sorted(slices, key=lambda interval: interval.start_seconds):
        lane = 0  # computation nests: recompute is inside a backward
        if interval.thread != _COMPUTE:
            lanes = free_since[interval.thread]
            lane = next((i for i, since in enumerate(lanes) if since <= interval.start_seconds + _ROUNDING), len(lanes))
            lanes[lane : lane + 1] = [interval.end_seconds]
        thread = _LANES * _THREADS.index(interval.thread) + lane
        threads[thread] = interval.thread
        events.append(_event(number, thread, interval))
    return [*_named(number, f"pipeline rank {number} of {ranks}", number, threads), *events]


def _event(process: int, thread: int, interval: _Slice) -> dict[str, Any]:
    times = {"ts": interval.start_seconds * 1e6, "dur": interval.seconds * 1e6}
    return {"ph": "X", "name": interval.name, "cat": interval.thread, "pid": process, "tid": thread, **times}


def _named(process: int, name: str, place: int, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    """The names of a process and its threads in the viewer, and their order."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": place}}
    for thread, what in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": what}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
