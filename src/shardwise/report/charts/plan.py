"""A plan and a run in pictures: strategies by time and memory, losses, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.planner.candidate import PARTS, Candidate, strategy_words
from shardwise.planner.plan import Plan
from shardwise.report.charts.chart import (
    BarChart,
    BarSeries,
    ChartAxis,
    ChartLimit,
    ChartUnit,
    LineChart,
    LineSeries,
    Tone,
    Value,
    chart_table,
    stacked_bars,
)
from shardwise.report.verdict import MEASURED_WORDS, PLAN_WORDS
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison
    from shardwise.run.metrics.lines import RunSummary


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


# -- a run: its loss, its throughput, and what was predicted beside what was measured ----------------


Records = Sequence[Mapping[str, Any]]
_MOST_POINTS = 600  # of a curve
_MOST_ROWS = 12


def loss_chart(records: Records) -> LineChart | None:
    """The loss of every step, and of the validation; None if none was recorded."""
    trained, validated = _curve(records, "loss"), _curve(records, "validation_loss")
    if not trained:
        return None
    series = [LineSeries("loss", trained, "blue")]
    if validated:
        series.append(LineSeries("validation loss", validated, "orange"))
    return LineChart(
        name="loss",
        title="Loss",
        caption=f"From {trained[0][1]:.3f} at step {trained[0][0]:,.0f} to {trained[-1][1]:.3f} at step "
        f"{trained[-1][0]:,.0f}.",
        x=ChartAxis("step", "number"),
        y=ChartAxis("loss", "loss"),
        series=tuple(series),
        table=_samples({"loss": trained, "validation loss": validated}, "loss"),
    )


def throughput_chart(records: Records, job: Job | None) -> LineChart | None:
    """Tokens in a second at every step, and what was predicted; None if none was recorded."""
    measured = _curve(records, "tokens_per_second")
    if not measured:
        return None
    series = [LineSeries("measured", measured, "blue")]
    predicted = next(
        (record["predicted_seconds"] for record in reversed(records) if record.get("predicted_seconds")), None
    )
    if predicted and job is not None:
        rate = job.tokens_per_step / predicted
        series.append(LineSeries("predicted", ((measured[0][0], rate), (measured[-1][0], rate)), "orange", "dashed"))
    return LineChart(
        name="throughput",
        title="Throughput",
        caption="Tokens in a second at every step of the run.",
        x=ChartAxis("step", "number"),
        y=ChartAxis("tokens in a second", "tokens/s"),
        series=tuple(series),
        table=_samples({curve.name: curve.points for curve in series}, "tokens/s"),
    )


def measured_words(summary: RunSummary) -> str:
    said = [counted(summary.steps, "step")]
    if summary.step_seconds is not None:
        said.append(f"{readable_seconds(summary.step_seconds)} a step (median)")
    if summary.tokens_per_second is not None:
        said.append(f"{summary.tokens_per_second:,.0f} tokens/s")
    if summary.first_loss is not None and summary.last_loss is not None:
        said.append(f"loss {summary.first_loss:.3f} to {summary.last_loss:.3f}")
    if summary.memory_bytes is not None:
        said.append(f"{readable_bytes(summary.memory_bytes)} at most")
    return ", ".join(said)


def _curve(records: Records, name: str) -> tuple[tuple[float, float], ...]:
    """(step, figure) of every record that has it; thinned evenly for a long run, always with the last."""
    points = [(float(record["step"]), float(record[name])) for record in records if record.get(name) is not None]
    return tuple(_thinned(points, _MOST_POINTS))


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Iterable[tuple[float, float]]:
    if len(points) <= most:
        return points
    return (points[round(number * (len(points) - 1) / (most - 1))] for number in range(most))


def _samples(curves: Mapping[str, Sequence[tuple[float, float]]], unit: ChartUnit) -> Any:
    columns: dict[str, ChartUnit] = {"curve": "words", "step": "number", "value": unit}
    rows: list[tuple[Value, ...]] = [
        (name, step, value) for name, points in curves.items() for step, value in _thinned(points, _MOST_ROWS)
    ]
    return chart_table(columns, rows)


def step_prediction_chart(summary: RunSummary) -> BarChart | None:
    """The step of a run beside its prediction; None if either is unknown."""
    if summary.step_seconds is None or summary.predicted_seconds is None:
        return None
    said = f"{readable_seconds(summary.step_seconds)} measured (median), {readable_seconds(summary.predicted_seconds)}"
    return _both("predicted-step", "Step: predicted and measured", f"{said} predicted.", "seconds",
                 {"step": (summary.predicted_seconds, summary.step_seconds)})  # fmt: skip


def memory_prediction_chart(summary: RunSummary) -> BarChart | None:
    """The peak memory of a run beside its prediction; None if either is unknown."""
    if summary.memory_bytes is None or summary.predicted_memory_bytes is None:
        return None
    said = (
        f"{readable_bytes(summary.memory_bytes)} measured, {readable_bytes(summary.predicted_memory_bytes)} predicted."
    )
    return _both("predicted-memory", "Memory: predicted and measured", said, "bytes",
                 {"peak of the fullest rank": (summary.predicted_memory_bytes, summary.memory_bytes)})  # fmt: skip


def comparison_chart(comparison: Comparison) -> BarChart:
    first, last = comparison.measured.numbers[0], comparison.measured.numbers[-1]
    parts = {
        MEASURED_WORDS.get(part.name, part.name): (part.predicted, part.measured)
        for part in comparison.parts
        if part.predicted or part.measured
    }
    whole = comparison.predicted.step_seconds, comparison.measured.step_seconds
    busiest = comparison.measured.busiest.rank
    return _both(
        "comparison",
        "Every part of the step: predicted and measured",
        f"Of rank {busiest}, which waits least, in steps {first} to {last}, which were profiled.",
        "seconds",
        {**parts, "step": whole},
    )


def memory_comparison_chart(comparison: Comparison) -> BarChart | None:
    """The memory of a profiled run beside its prediction; None if it was not measured."""
    if not comparison.memory:
        return None
    parts = {part.name: (part.predicted, part.measured) for part in comparison.memory}
    return _both("comparison-memory", "Memory: predicted and measured", "Of the fullest rank.", "bytes", parts)


def _both(name: str, title: str, caption: str, unit: ChartUnit, parts: Mapping[str, tuple[float, float]]) -> BarChart:
    predicted, measured = (tuple(both[which] for both in parts.values()) for which in (0, 1))
    rows: list[tuple[Value, ...]] = [
        (part, *both, both[1] / both[0] if both[0] else None) for part, both in parts.items()
    ]
    return BarChart(
        name=name,
        title=title,
        caption=caption,
        axis=ChartAxis(unit, unit),
        categories=tuple(parts),
        series=(BarSeries("predicted", predicted, "sky"), BarSeries("measured", measured, "blue")),
        is_stacked=False,
        table=chart_table(
            {"part": "words", "predicted": unit, "measured": unit, "measured / predicted": "share"}, rows
        ),
    )
