"""The pipeline of a step, drawn: which rank runs which pass of which microbatch, and when it is idle."""

from __future__ import annotations

from itertools import islice

from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import step_timeline
from shardwise.pipeline import ActionKind, Timeline
from shardwise.report.charts.chart import ChartAxis, SpanChart, SpanKind, Tone, chart_table
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_seconds, readable_share

MOST_PASSES = 60_000  # simulated for a picture: a tenth of a second
_MOST_DRAWN = 4200
_MOST_ROWS = 32
_TONES: dict[ActionKind, Tone] = {
    ActionKind.F: "blue",
    ActionKind.B: "orange",
    ActionKind.I: "orange",
    ActionKind.W: "gold",
}
_AFTER: Tone = "grey"


def timeline_chart(job: Job) -> SpanChart | None:
    """Every pass of the step, then reductions and the optimizer; None if the step has too many passes to draw."""
    if 3 * job.microbatches * job.strategy.stages > MOST_PASSES:
        return None
    prediction = predict(job)
    timeline = step_timeline(prediction)
    ranks = _shown_ranks(timeline)
    each = max(1, _MOST_DRAWN // len(ranks))
    whole = max(len(timeline.schedule.actions[rank]) for rank in ranks) <= each
    start = min(own[0] for own in timeline.starts if own)
    drawn_to = max(timeline.ends[rank][:each][-1] for rank in ranks) - start
    used = [kind for kind in ActionKind if any(action.kind is kind for action in timeline.schedule.actions[ranks[0]])]
    kinds = [SpanKind(kind.words, _TONES[kind]) for kind in used]
    spans = [
        (row, _short(begin - start), _short(end - start), used.index(action.kind), f"{action.kind}{action.microbatch}")
        for row, rank in enumerate(ranks)
        for action, begin, end in islice(
            zip(timeline.schedule.actions[rank], timeline.starts[rank], timeline.ends[rank]), each
        )
        if end > begin
    ]
    end, span = timeline.step_seconds(job.stack.step_ends) + prediction.tail_seconds, timeline.makespan_seconds
    if whole:
        kinds.append(SpanKind("reductions, optimizer", _AFTER))
        spans += [(row, end - prediction.tail_seconds, end, len(used), "") for row in range(len(ranks))]
    return SpanChart(
        name="timeline",
        title=_title(job),
        caption=_caption(timeline, len(ranks), each, whole=whole),
        axis=ChartAxis("seconds into the step", "seconds"),
        rows=tuple(f"rank {rank}" for rank in ranks),
        kinds=tuple(kinds),
        spans=tuple(spans),
        end=end if whole else drawn_to,
        table=chart_table(
            {"rank": "words", "passes": "number", "busy": "seconds", "idle": "seconds", "idle share": "share"},
            [
                (f"rank {rank}", float(len(timeline.schedule.actions[rank])), busy, span - busy, (span - busy) / span)
                for rank, busy in enumerate(timeline.busy)
            ],
        ),
    )


def _short(seconds: float) -> float:
    """Rounded to what any screen can show: a file has thousands of them."""
    return float(f"{seconds:.7g}")


def _shown_ranks(timeline: Timeline) -> list[int]:
    """All ranks of a short pipeline; of a long one an even selection with both ends."""
    count = timeline.schedule.ranks
    if count <= _MOST_ROWS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (_MOST_ROWS - 1)) for number in range(_MOST_ROWS)})


def _title(job: Job) -> str:
    strategy = job.strategy
    if strategy.pp == 1:
        return f"One step: {counted(job.microbatches, 'microbatch')} one after the other"
    return f"Pipeline of one step: {strategy.schedule}, {strategy.pp} ranks, {counted(job.microbatches, 'microbatch')}"


def _caption(timeline: Timeline, rows: int, each: int, *, whole: bool) -> str:
    idle, span = timeline.idle_seconds("together"), timeline.makespan_seconds
    said = [f"A rank is idle for {readable_seconds(idle)} or {readable_share(idle / span)} of the passes, on average."]
    if rows < timeline.schedule.ranks:
        said.append(f"{rows} of {timeline.schedule.ranks} ranks are drawn.")
    if not whole:
        said.append(f"The first {each:,} passes of each are drawn.")
    return " ".join(said)
