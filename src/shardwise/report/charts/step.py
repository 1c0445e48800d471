"""Where a predicted step goes, and what its communication does on every level of the network."""

from __future__ import annotations

from shardwise.cost.analysis import Analysis
from shardwise.cost.step.parts import COMMUNICATION, STEP_PARTS
from shardwise.report.charts.chart import (
    TONES,
    BarChart,
    BarSeries,
    ChartAxis,
    Tone,
    chart_table,
    stacked_bars,
)
from shardwise.report.part_names import DIMENSIONS, STEP_WORDS
from shardwise.spec.units import counted, readable_seconds, readable_share

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
    """The parts of the step, which add up to it; a bar each."""
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
    """What each dimension sends in a step: the seconds that computation hides, and those that the step waits."""
    names = _sending(analysis)
    traffics = {name: analysis.dimension_traffics(name) for name in names}
    hidden, exposed, slowed = (
        tuple(sum(getattr(one, figure) for one in traffics[name]) for name in names)
        for figure in ("hidden_seconds", "exposed_seconds", "slowed_seconds")
    )
    sent, seconds = (
        [sum(getattr(one, figure) for one in traffics[name]) for name in names] for figure in ("bytes_sent", "seconds")
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
