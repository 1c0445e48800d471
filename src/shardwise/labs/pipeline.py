"""Lab: bubbles of pipeline schedules, simulated and run by the engine on 4 processes.

A pass sleeps until its planned time is over, so that four ranks share two cores without slowing each other down. Order,
messages and waiting are the engine's own. The simulator gets the times that the passes really took.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.engine.labels import PassKind
from shardwise.engine.pipeline.runtime import schedule_of
from shardwise.labs.ranks import EngineRun, Pace, TimedRange, lab_job, run_engine
from shardwise.labs.registry import LabFinding, LabReport, LabSetup
from shardwise.pipeline import (
    Action,
    ActionKind,
    PipelineSchedule,
    StageTimes,
    Timeline,
    draw_timeline,
    equal_stages,
    peak_activations,
    peak_chunks_in_flight,
    simulate,
    stage_times,
    trace_events,
)
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.job import Job
from shardwise.spec.schedules import ScheduleRecord, own_schedules
from shardwise.spec.units import readable_seconds, readable_share

RANKS, MICROBATCHES = 4, 8
# For all layers of a rank; the same for forward, input gradient and weight gradient.
PASS_SECONDS, SHORT_PASS_SECONDS = 0.03, 0.016
STEP_TOLERANCE = 0.2  # sleeping ends late, and messages take their time
_WIDTH = 92
_KINDS: dict[PassKind, ActionKind] = {
    "forward": ActionKind.F, "backward": ActionKind.I, "weight gradients": ActionKind.W,
}  # fmt: skip


@dataclass(frozen=True)
class RunSchedule:
    """A schedule as it was simulated and as it ran."""

    record: ScheduleRecord
    schedule: PipelineSchedule
    simulated: Timeline
    measured: Timeline
    losses: tuple[float, ...]

    @property
    def simulated_seconds(self) -> float:
        return self.simulated.makespan_seconds

    @property
    def measured_seconds(self) -> float:
        return self.measured.makespan_seconds

    def idle_share(self, timeline: Timeline) -> float:
        return timeline.idle_seconds("together") / timeline.makespan_seconds


def run(setup: LabSetup) -> LabReport:
    records = list(_schedules(every=not setup.short))
    runs = []
    for number, record in enumerate(records, 1):
        setup.on_progress(f"{record.name} ({number} of {len(records)})")
        runs.append(_run(setup, record))
    findings = [finding for each in runs for finding in _findings(each, runs[0])]
    return LabReport(tuple(_pieces(runs)), tuple(findings), _files(runs))


def _schedules(*, every: bool) -> Iterator[ScheduleRecord]:
    """All schedules that the engine runs and the planner searches, or the first of every kind."""
    seen = set()
    for record in own_schedules():
        idea = (
            record.placement,
            record.chooses_chunks,
            record.splits_backward,
            record.forwards_first,
            record.hides_exchange,
        )
        if record.runs and record.searched and (every or idea not in seen):
            seen.add(idea)
            yield record


def _job(record: ScheduleRecord) -> Job:
    chunks = 2 if record.chooses_chunks else 1
    strategy = {"dp": 1, "pp": RANKS, "schedule": record.name, "interleave": chunks, "microbatch": 1}
    return lab_job(strategy, layers=2 * RANKS, batch=MICROBATCHES, seq=16)


def _run(setup: LabSetup, record: ScheduleRecord) -> RunSchedule:
    job = _job(record)
    schedule = schedule_of(job)
    each = (SHORT_PASS_SECONDS if setup.short else PASS_SECONDS) / job.strategy.chunks_per_rank
    full = frozenset(
        (action.stage, action.microbatch) for own in schedule.actions for action in own if action.kind is ActionKind.B
    )
    pace = Pace(dict.fromkeys(_KINDS, each), full)
    ranks = run_engine(setup.pool, EngineRun(job, steps=3 if setup.short else 6, counts=False, pace=pace))
    steps = [_timeline(schedule, [rank.ranges[step] for rank in ranks]) for step in range(1, len(ranks[0].ranges))]
    measured = min(steps, key=lambda timeline: timeline.makespan_seconds)  # other load on the machine only adds time
    return RunSchedule(record, schedule, simulate(schedule, _times(measured)), measured, ranks[0].losses)


def _timeline(schedule: PipelineSchedule, ranks: Sequence[Sequence[TimedRange]]) -> Timeline:
    """What the ranks did in a step, in the simulator's form; its schedule has the actions that ran."""
    passes = [[span for span in own if span.label.pass_kind is not None] for own in ranks]
    begun = min(span.start for own in passes for span in own)
    actions = tuple(tuple(_actions(own)) for own in passes)
    ran = replace(schedule, actions=actions)
    starts = tuple(tuple(span.start - begun for span in own) for own in passes)
    ends = tuple(tuple(span.end - begun for span in own) for own in passes)
    busy = tuple(sum(span.end - span.start for span in own) for own in passes)
    return Timeline(ran, starts, ends, ends, busy)


def _actions(passes: Sequence[TimedRange]) -> Iterator[Action]:
    """The actions of passes; a backward pass is whole if no pass for its weight gradients follows."""
    labels = [span.label for span in passes]
    split = {(label.stage, label.number) for label in labels if label.pass_kind == "weight gradients"}
    for label in labels:
        assert label.pass_kind is not None and label.stage is not None
        whole = label.pass_kind == "backward" and (label.stage, label.number) not in split
        yield Action(ActionKind.B if whole else _KINDS[label.pass_kind], label.stage, label.number)


def _times(measured: Timeline) -> StageTimes:
    """How long every stage's passes of each kind took, on average over the microbatches."""
    lasted: dict[tuple[ActionKind, int], list[float]] = {}
    for actions, starts, ends in zip(measured.schedule.actions, measured.starts, measured.ends):
        for action, start, end in zip(actions, starts, ends):
            lasted.setdefault((action.kind, action.stage), []).append(end - start)
    stages = range(measured.schedule.stages)
    mean = {kind: [statistics.fmean(lasted.get((kind, stage), [0.0])) for stage in stages] for kind in ActionKind}
    return stage_times(*(mean[kind] for kind in (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)))


# -- theory beside measurement ---------------------------------------------------------------------------


def _findings(ran: RunSchedule, first: RunSchedule) -> Iterator[LabFinding]:
    name, schedule = ran.record.name, ran.schedule
    planned = [action for actions in schedule.actions for action in actions]
    done = [action for actions in ran.measured.schedule.actions for action in actions]
    same = sum(ours == theirs for ours, theirs in zip(planned, done)) if len(planned) == len(done) else 0
    yield LabFinding(
        f"{name}: passes in the planned order", len(planned), same, 0,
        "order: the list of actions that the simulator times is the one that the engine runs",
    )  # fmt: skip
    held = max(peak_activations(ran.measured.schedule))
    forms = (peak_chunks_in_flight(name, RANKS, MICROBATCHES, ran.schedule.stages // RANKS, rank) for rank in range(4))
    yield LabFinding(
        f"{name}: chunks whose activations a rank holds", max(forms), held, 0, f"held: {ran.record.source}"
    )
    yield LabFinding(
        f"{name}: loss of the last step", first.losses[-1], ran.losses[-1], 1e-5,
        "loss: a schedule changes the order of sums, not what is summed",
    )  # fmt: skip
    yield LabFinding(
        f"{name}: one step", ran.simulated_seconds, ran.measured_seconds, STEP_TOLERANCE,
        "step: simulated with the mean time of every stage's passes, messages taken as instant",
        unit="seconds", timed=True,
    )  # fmt: skip


def _pieces(runs: Sequence[RunSchedule]) -> Iterator[Piece]:
    yield Line(
        f"{RANKS} ranks, {MICROBATCHES} microbatches; F forward, B backward, or I input gradient and W weight "
        "gradient; lower case: a rank's second chunk; dots: the bubble.\n"
    )
    for ran in runs:
        ideal = simulate(ran.schedule, equal_stages(ran.schedule.stages))
        yield Line("theory   " + draw_timeline(ideal, _WIDTH) + "\n", fixed=True)
    yield Line("\nAs they ran:\n", "bold")
    for ran in runs:
        yield Line("measured " + draw_timeline(ran.measured, _WIDTH) + "\n", fixed=True)
    rows = [
        (
            ran.record.name,
            bar(ran.idle_share(ran.measured), 20),
            readable_share(ran.idle_share(ran.simulated)),
            readable_share(ran.idle_share(ran.measured)),
            readable_seconds(ran.simulated_seconds),
            readable_seconds(ran.measured_seconds),
        )
        for ran in runs
    ]
    names = ("schedule", "idle", "simulated", "measured", "step simulated", "measured")
    yield table("Bubbles", names, rows, numbers_from=2)


def _files(runs: Sequence[RunSchedule]) -> dict[str, str]:
    """Chrome traces, for ui.perfetto.dev."""
    events = []
    for number, ran in enumerate(runs):
        for place, (title, timeline) in enumerate((("simulated", ran.simulated), ("measured", ran.measured))):
            for event in trace_events(timeline):
                named = {"args": {"name": f"{ran.record.name}, {title}"}} if event["name"] == "process_name" else {}
                events.append({**event, **named, "pid": 2 * number + place})
    return {"pipeline-trace.json": json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})}
