"""A plan in pictures: every simulated strategy by memory and time, and where the step of the best ones goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.planner.candidate import PARTS, Candidate
from shardwise.planner.describe import strategy_words
from shardwise.planner.plan import Plan
from shardwise.report.charts.chart import (
    BarChart,
    BarSeries,
    ChartAxis,
    ChartLimit,
    LineChart,
    LineSeries,
    Tone,
    Value,
    chart_table,
    stacked_bars,
)
from shardwise.report.part_names import PLAN_WORDS
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_seconds

_TONES: dict[str, Tone] = {
    "compute": "navy",
    "recompute": "gold",
    "tp": "orange",
    "cp": "pink",
    "ep": "purple",
    "bubble": "red",
    "dp": "green",
    "offload": "teal",
    "optimizer": "sky",
    "stragglers": "grey",
}


def pareto_chart(found: Plan, front: Sequence[Candidate], own: Candidate | None = None) -> LineChart:
    """Time against memory of all that was simulated, with its front; ``own`` is a job to mark beside the plan."""
    marked = own or found.best
    name = "this job" if own is not None else "the plan"
    return LineChart(
        name="pareto",
        title="Time against memory",
        caption=(
            f"{counted(len(found.candidates), 'strategy')} of {found.search.priced:,} priced were simulated. On the "
            f"front nothing is faster with less memory. {name.capitalize()} takes "
            f"{readable_seconds(marked.step_seconds)}."
        ),
        x=ChartAxis("memory of the fullest device", "bytes"),
        y=ChartAxis("predicted step", "seconds", is_log=True),
        series=(
            LineSeries("simulated", _points(found.candidates), "grey", "points", _labels(found.candidates)),
            LineSeries("front", _points(front), "blue", "line", _labels(front)),
            LineSeries(name, _points([marked]), "orange", "points", _labels([marked])),
        ),
        table=chart_table(
            {"strategy on the front": "words", "memory": "bytes", "step": "seconds", "step / the plan's": "share"},
            [_row(one, found.best) for one in front],
        ),
    )


def _points(candidates: Iterable[Candidate]) -> tuple[tuple[float, float], ...]:
    return tuple((one.memory.total, one.step_seconds) for one in candidates)


def _labels(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(strategy_words(one.job.strategy) for one in candidates)


def _row(one: Candidate, best: Candidate) -> tuple[Value, ...]:
    return strategy_words(one.job.strategy), one.memory.total, one.step_seconds, 1 + one.loss_to(best)


def ranking_chart(found: Plan, top: int = 8) -> BarChart:
    """Where the step of the best layouts goes; a bar for each."""
    best = [row.best for row in found.rows[:top]]
    parts = [part for part in PARTS if any(one.parts[part] > 0 for one in best)]
    return stacked_bars(
        "layout",
        ChartAxis("predicted step", "seconds"),
        _numbered(best),
        [BarSeries(PLAN_WORDS[part], tuple(one.parts[part] for one in best), _TONES[part]) for part in parts],
        total="in all",
        name="ranking",
        title="Where the step of the best layouts goes",
        caption=f"Ranked: the simplest of those within noise ({found.noise.share:.1%}) of the fastest first.",
    )


def memory_of_layouts_chart(found: Plan, top: int = 8) -> BarChart:
    """What the fullest device of the best layouts holds, against what plans may fill."""
    best, room = [row.best for row in found.rows[:top]], found.request.room
    return stacked_bars(
        "layout",
        ChartAxis("memory of the fullest device", "bytes"),
        _numbered(best),
        [BarSeries("memory", tuple(one.memory.total for one in best), "blue")],
        name="ranking-memory",
        title="Memory of the best layouts",
        caption="Of the fullest device of each.",
        limits=(ChartLimit("usable memory of a device", room.usable_bytes),),
    )


def _numbered(candidates: Iterable[Candidate]) -> list[str]:
    return [f"{number}. {words}" for number, words in enumerate(_labels(candidates), 1)]


def same_strategy(found: Plan, job: Job) -> Candidate | None:
    """The candidate with the strategy of a job, if it was simulated."""
    return next((one for one in found.candidates if one.job.strategy == job.strategy), None)
