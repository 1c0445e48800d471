"""A plan in pictures: time against memory of every simulated strategy, and the parts of the best ones' steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.planner.candidate import PARTS, Candidate, strategy_words
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


def pareto_chart(plan: Plan, front: Sequence[Candidate], own: Candidate | None = None) -> LineChart:
    """Time against memory of all simulated strategies, with the Pareto front; ``own`` is marked instead of the plan."""
    marked = own or plan.best
    name = "this job" if own is not None else "the plan"
    return LineChart(
        name="pareto",
        title="Time against memory",
        caption=(
            f"{counted(len(plan.candidates), 'strategy')} of {plan.search.priced:,} priced were simulated. On the "
            f"front nothing is faster with less memory. {name.capitalize()} takes "
            f"{readable_seconds(marked.step_seconds)}."
        ),
        x=ChartAxis("memory of the fullest device", "bytes"),
        y=ChartAxis("predicted step", "seconds", is_log=True),
        series=(
            LineSeries("simulated", _points(plan.candidates), "grey", "points", _labels(plan.candidates)),
            LineSeries("front", _points(front), "blue", "line", _labels(front)),
            LineSeries(name, _points([marked]), "orange", "points", _labels([marked])),
        ),
        table=chart_table(
            {"strategy on the front": "words", "memory": "bytes", "step": "seconds", "step / the plan's": "share"},
            [_row(candidate, plan.best) for candidate in front],
        ),
    )


def _points(candidates: Iterable[Candidate]) -> tuple[tuple[float, float], ...]:
    return tuple((candidate.memory.total, candidate.step_seconds) for candidate in candidates)


def _labels(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(strategy_words(candidate.job.strategy) for candidate in candidates)


def _row(candidate: Candidate, best: Candidate) -> tuple[Value, ...]:
    return (
        strategy_words(candidate.job.strategy),
        candidate.memory.total,
        candidate.step_seconds,
        1 + candidate.loss_to(best),
    )


def ranking_chart(plan: Plan, top: int = 8) -> BarChart:
    """Where the step of the best layouts goes; a bar for each."""
    best = [row.best for row in plan.rows[:top]]
    parts = [part for part in PARTS if any(candidate.parts[part] > 0 for candidate in best)]
    return stacked_bars(
        "layout",
        ChartAxis("predicted step", "seconds"),
        _numbered(best),
        [
            BarSeries(PLAN_WORDS[part], tuple(candidate.parts[part] for candidate in best), _TONES[part])
            for part in parts
        ],
        total="in all",
        name="ranking",
        title="Where the step of the best layouts goes",
        caption=f"Ranked: the simplest of those within noise ({plan.noise.share:.1%}) of the fastest first.",
    )


def memory_of_layouts_chart(plan: Plan, top: int = 8) -> BarChart:
    """Memory of the fullest device under each of the best layouts."""
    best, room = [row.best for row in plan.rows[:top]], plan.request.room
    return stacked_bars(
        "layout",
        ChartAxis("memory of the fullest device", "bytes"),
        _numbered(best),
        [BarSeries("memory", tuple(candidate.memory.total for candidate in best), "blue")],
        name="ranking-memory",
        title="Memory of the best layouts",
        caption="Of the fullest device of each.",
        limits=(ChartLimit("usable memory of a device", room.usable_bytes),),
    )


def _numbered(candidates: Iterable[Candidate]) -> list[str]:
    return [f"{number}. {words}" for number, words in enumerate(_labels(candidates), 1)]


def same_strategy(plan: Plan, job: Job) -> Candidate | None:
    """The candidate with the strategy of a job, if it was simulated."""
    return next((candidate for candidate in plan.candidates if candidate.job.strategy == job.strategy), None)
