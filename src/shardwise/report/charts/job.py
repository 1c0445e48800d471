"""A job's prediction in pictures: where a step goes, its pipeline over time, and the whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from shardwise.cost.analysis import Analysis
from shardwise.cost.campaign import Campaign
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.scaling import PricedTopology, ScalingRow
from shardwise.cost.step.simulation import COMMUNICATION, STEP_PARTS, step_timeline
from shardwise.cost.step.stage_time import operator_points
from shardwise.pipeline import ActionKind, Timeline
from shardwise.report.analysis import SHARES
from shardwise.report.charts.chart import (
    TONES,
    BarChart,
    BarSeries,
    ChartAxis,
    LineChart,
    LineSeries,
    SpanChart,
    SpanKind,
    Tone,
    chart_table,
    stacked_bars,
)
from shardwise.report.verdict import DIMENSIONS, STEP_WORDS
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_count,
    readable_duration,
    readable_flops,
    readable_money,
    readable_rate,
    readable_seconds,
    readable_share,
)

# -- where a step goes, what it sends on every network level, and its operators under the roofline ---

_TONES: dict[str, Tone] = {
    "products": "navy",
    "attention": "blue",
    "memory-bound": "sky",
    "launches": "steel",
    "recompute": "gold",
    "tp": "orange",
    "cp": "pink",
    "ep": "purple",
    "bubble": "red",
    "pp": "teal",
    "dp": "green",
    "offload": "lime",
    "optimizer": "brown",
    "overhead": "steel",
    "stragglers": "grey",
}


def step_chart(analysis: Analysis) -> BarChart:
    step = analysis.predicted_seconds
    parts = {name: analysis.parts[name] for name in STEP_PARTS if analysis.parts[name]}
    longest = max(parts, key=lambda name: parts[name])
    categories = tuple(STEP_WORDS[name] for name in parts)
    rows = [(STEP_WORDS[name], seconds, seconds / step) for name, seconds in parts.items()]
    return BarChart(
        name="step",
        title=f"Where the step of {readable_seconds(step)} goes",
        caption=f"Most of it: {STEP_WORDS[longest]}, {readable_share(parts[longest] / step)} of the step.",
        axis=ChartAxis("seconds of a step", "seconds"),
        categories=categories,
        # A series for each part, so that each has its colour.
        series=tuple(
            BarSeries(STEP_WORDS[name], tuple(seconds * (name == other) for other in parts), _TONES[name])
            for name, seconds in parts.items()
        ),
        is_stacked=True,
        table=chart_table(
            {"part": "words", "seconds": "seconds", "share of the step": "share"},
            [*rows, ("predicted step time", step, 1.0)],
        ),
    )


def communication_chart(analysis: Analysis) -> BarChart:
    """Seconds of communication of each dimension in a step: hidden behind computation, or exposed."""
    names = _sending(analysis)
    traffics = {name: analysis.dimension_traffics(name) for name in names}
    hidden, exposed, slowed = (
        tuple(sum(getattr(traffic, figure) for traffic in traffics[name]) for name in names)
        for figure in ("hidden_seconds", "exposed_seconds", "slowed_seconds")
    )
    sent, seconds = (
        [sum(getattr(traffic, figure) for traffic in traffics[name]) for name in names]
        for figure in ("bytes_sent", "seconds")
    )
    adds = [analysis.parts[name] for name in names]
    rows = zip((DIMENSIONS[name] for name in names), sent, seconds, hidden, adds)
    return BarChart(
        name="communication",
        title="Communication of each dimension",
        caption=(
            f"{readable_share(analysis.exposed_share)} of the step waits for communication. "
            "Of the device that sets the pace of each dimension."
        ),
        axis=ChartAxis("seconds of a step", "seconds"),
        categories=tuple(DIMENSIONS[name] for name in names),
        series=(
            BarSeries("hidden behind computation", hidden, "sky"),
            BarSeries("exposed: the step waits", exposed, "orange"),
            BarSeries("computation slowed by it", slowed, "gold"),
        ),
        is_stacked=True,
        table=chart_table(
            {
                "dimension": "words",
                "bytes sent": "bytes",
                "seconds": "seconds",
                "hidden": "seconds",
                "adds to the step": "seconds",
            },
            rows,
        ),
    )


def levels_chart(analysis: Analysis) -> BarChart:
    """How long each dimension keeps the links of each network level busy."""
    names = _sending(analysis)
    busy = {name: analysis.level_use(name) for name in names}
    used = dict.fromkeys(level for own in busy.values() for level in own)
    inside = [level.name for level in analysis.job.cluster.levels]
    levels = sorted(used, key=lambda name: inside.index(name) if name in inside else len(inside))
    series = [
        BarSeries(level, tuple(busy[name].get(level, (0.0, 0.0))[0] for name in names), TONES[number % len(TONES)])
        for number, level in enumerate(levels)
    ]
    return stacked_bars(
        "dimension",
        ChartAxis("seconds that links are busy", "seconds"),
        [DIMENSIONS[name] for name in names],
        series,
        name="levels",
        title="Which level of the network it keeps busy",
        caption=(
            f"{counted(len(levels), 'network level')}, innermost first: how long the busiest link of each moves bytes, "
            "without latencies."
        ),
    )


def _sending(analysis: Analysis) -> list[str]:
    return [name for name in COMMUNICATION if analysis.dimension_traffics(name)]


def roofline_chart(job: Job) -> LineChart:
    """The forward pass of one microbatch on the busiest pipeline rank; the roof is the data sheet's."""
    slowest = predict(job).slowest
    view = slowest.job
    device, data_type = view.cluster.device, view.training.recipe.compute
    peak, bandwidth = device.peak_flops(data_type), device.memory_bandwidth
    points = operator_points(view, slowest.contents)
    ridge = peak / bandwidth
    low = min([ridge / 8, *(point.flops_per_byte / 2 for point in points)])
    high = max([ridge * 8, *(point.flops_per_byte * 2 for point in points)])
    roof = ((low, low * bandwidth), (ridge, peak), (high, peak))
    return LineChart(
        name="roofline",
        title=f"Roofline of {device.name}",
        caption=(
            f"The roof: {readable_rate(bandwidth)} of memory, then {readable_flops(peak)}/s in {data_type}. An "
            f"operator left of {ridge:.3g} FLOPs a byte is bound by memory. Forward pass, one layer, one microbatch."
        ),
        x=ChartAxis("FLOPs per byte moved", "count", is_log=True),
        y=ChartAxis("FLOP/s", "FLOP/s", is_log=True),
        series=(
            LineSeries("the device's roof", roof, "grey", "edge"),
            *(
                LineSeries(point.words, ((point.flops_per_byte, point.rate),), TONES[number % len(TONES)], "points",
                           (f"{point.words}: {readable_share(point.rate / peak)} of the peak",))
                for number, point in enumerate(points)
            ),
        ),
        table=chart_table(
            {"operator": "words", "FLOPs a byte": "count", "reached": "FLOP/s", "of the peak": "share",
             "seconds": "seconds"},
            [(point.words, point.flops_per_byte, point.rate, point.rate / peak, point.seconds) for point in points],
        ),
    )  # fmt: skip


# -- the pipeline: which rank runs which pass of which microbatch, and when it is idle ---------------

MOST_PASSES = 60_000  # simulated for a picture: a tenth of a second
_MOST_DRAWN = 4200
_MOST_ROWS = 32
_PASS_TONES: dict[ActionKind, Tone] = {
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
    kinds = [SpanKind(kind.words, _PASS_TONES[kind]) for kind in used]
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


# -- more devices, other networks, and the whole run -------------------------------------------------

_SCALING: dict[str, Tone] = {"strong": "blue", "weak": "orange"}
_MEANS = {"strong": "fixed batch", "weak": "batch grows with the devices"}
_SHARE_TONES: dict[str, Tone] = {"training": "blue", "checkpoints": "gold", "restarts": "orange", "lost": "red"}


def scaling_chart(scaling: Mapping[str, Sequence[ScalingRow]]) -> LineChart:
    return LineChart(
        name="scaling",
        title="Scaling over data parallelism",
        caption="Strong: T1/(N·TN) at a fixed batch. Weak: T1/TN at a batch that grows with N.",
        x=ChartAxis("devices", "number", is_log=True),
        y=ChartAxis("efficiency", "share"),
        series=tuple(
            LineSeries(
                f"{kind}: {_MEANS[kind]}",
                tuple((float(row.devices), row.efficiency) for row in rows),
                _SCALING[kind],
            )
            for kind, rows in scaling.items()
        ),
        table=chart_table(
            {"scaling": "words", "devices": "number", "sequences": "number", "step": "seconds", "tokens/s": "tokens/s",
             "efficiency": "share", "exposed": "share", "memory": "words"},
            [
                (kind, row.devices, row.sequences, row.predicted_seconds, row.tokens_per_second, row.efficiency,
                 row.exposed_share, row.fit)
                for kind, rows in scaling.items() for row in rows
            ],
        ),
    )  # fmt: skip


def campaign_chart(run: Campaign) -> BarChart:
    shares = {name: share for name, share in run.shares.items() if share > 0}
    money = "" if run.cost is None else f", {readable_money(run.cost, run.currency)}"
    return BarChart(
        name="campaign",
        title=f"The whole run: {readable_count(run.tokens)} tokens in {readable_duration(run.seconds)}{money}",
        caption=f"{readable_share(run.goodput)} of the time moves training forward.",
        axis=ChartAxis("time", "seconds"),
        categories=(counted(run.devices, "device"),),
        series=tuple(
            BarSeries(SHARES[name], (share * run.seconds,), _SHARE_TONES[name]) for name, share in shares.items()
        ),
        is_stacked=True,
        table=chart_table({"figure": "words", "value": "words"}, _campaign_rows(run, shares)),
    )


def _campaign_rows(run: Campaign, shares: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = [(SHARES[name], readable_duration(share * run.seconds)) for name, share in shares.items()]
    rows += [("whole run, wall time", readable_duration(run.seconds)), ("days", f"{run.days:,.2f}")]
    rows.append(("device-hours", readable_count(run.device_hours)))
    if run.cost is not None:
        rows.append(("cost", readable_money(run.cost, run.currency)))
    if math.isfinite(run.between_interruptions):
        rows.append(("interruptions", f"{run.interruptions:,.{0 if run.interruptions >= 10 else 2}f}"))
    return [*rows, ("goodput", readable_share(run.goodput))]


_DIMENSION_TONES: dict[str, Tone] = {
    "tp": "orange",
    "cp": "pink",
    "ep": "purple",
    "pp": "teal",
    "dp": "green",
    "offload": "gold",
}


def topologies_chart(topologies: Sequence[PricedTopology]) -> BarChart:
    names = list(dict.fromkeys(name for topology in topologies for name in topology.dimensions))
    exposed = {
        name: tuple(
            topology.dimensions[name].exposed_seconds if name in topology.dimensions else 0.0 for topology in topologies
        )
        for name in names
    }
    others = tuple(topology.predicted_seconds - sum(own) for topology, *own in zip(topologies, *exposed.values()))
    series = (
        BarSeries("computation and all else", others, "navy"),
        *(
            BarSeries(f"{DIMENSIONS[name]}, exposed", seconds, _DIMENSION_TONES[name])
            for name, seconds in exposed.items()
        ),
    )
    fastest = min(topologies, key=lambda topology: topology.predicted_seconds)
    return stacked_bars(
        "topology",
        ChartAxis("predicted step", "seconds"),
        [topology.topology for topology in topologies],
        series,
        total="in all",
        name="topologies",
        title="The same job on other networks",
        caption=(
            f"The fastest: {fastest.topology}, {fastest.network}. Flat ones join all devices by the outermost link."
        ),
    )
