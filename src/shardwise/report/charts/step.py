"""Where a predicted step goes, what it sends on every network level, and its operators under the roofline."""

from __future__ import annotations

from shardwise.cost.analysis import Analysis
from shardwise.cost.step.operator_points import operator_points
from shardwise.cost.step.parts import COMMUNICATION, STEP_PARTS
from shardwise.cost.step.prediction import predict
from shardwise.report.charts.chart import (
    TONES,
    BarChart,
    BarSeries,
    ChartAxis,
    LineChart,
    LineSeries,
    Tone,
    chart_table,
    stacked_bars,
)
from shardwise.report.part_names import DIMENSIONS, STEP_WORDS
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_flops, readable_rate, readable_seconds, readable_share

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
    """A bar for each part of the step; they add up to it."""
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
