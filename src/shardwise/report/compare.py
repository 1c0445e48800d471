"""Predictions beside measurements, as pages and as plain data: of one run, and of tables of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Page, Piece, paged
from shardwise.report.tables import FittedTable
from shardwise.report.verdict import MEASURED_WORDS
from shardwise.spec.units import readable_bytes, readable_change, readable_difference, readable_seconds

if TYPE_CHECKING:
    from shardwise.accuracy.scores import Coverage, ErrorSummary, LayoutChoice, Score, ScoredRuns, Summary
    from shardwise.measure.compare.comparison import Comparison
    from shardwise.measure.compare.step_parts import RankTimes


_MOST_RANKS = 16
_SENT_COLUMNS = ("", "collectives", "planned", "recorded")


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    slow = comparison.slow_link
    own = {} if slow is None else picked(slow.link, "nodes", "dimension", "what", "bytes", "seconds")
    return {
        "steps": comparison.measured.numbers,
        "step_seconds": picked(
            comparison, predicted="predicted.step_seconds", profiled="measured.step_seconds", usual="usual_seconds"
        ),
        "parts": {
            part.name: picked(part, "predicted", "measured", "hidden_predicted", "hidden_measured")
            for part in comparison.parts
        },
        "memory": {
            part.name: picked(part, predicted_bytes="predicted", measured_bytes="measured")
            for part in comparison.memory
        },
        "differences": [
            picked(part, part="name", seconds="difference", cause="cause") for part in comparison.differences
        ],
        "ranks": [
            {
                **picked(rank, "rank", "node"),
                "compute_seconds": rank.parts.get("compute", 0.0),
                **picked(rank, waits_seconds="waits", layer_seconds="layer_seconds"),
            }
            for rank in comparison.measured.ranks
        ],
        "sent": {
            ", ".join(traffic.dimensions): {
                **picked(traffic, "collectives", planned_bytes="planned", recorded_bytes="recorded"),
                "unrecorded": list(traffic.unrecorded),
            }
            for traffic in comparison.sent
        },
        "slow_rank": comparison.slow_rank,
        "slow_link": slow and {"ranks": slow.link.members, **own, **picked(slow, "times", "than")},
    }


@paged
def comparison_page(comparison: Comparison, trace: Path | None) -> Iterator[Piece | str]:
    busiest = comparison.measured.busiest
    title = f"A step of rank {busiest.rank}, which waits least, beside its prediction"
    rows = [
        (
            MEASURED_WORDS.get(part.name, part.name),
            *(readable_seconds(seconds) for seconds in (part.predicted, part.measured)),
            readable_difference(part.difference),
            *(_optional(seconds) for seconds in (part.hidden_predicted, part.hidden_measured)),
        )
        for part in comparison.parts
    ]
    whole = (comparison.predicted.step_seconds, comparison.measured.step_seconds)
    rows.append(("step", *map(readable_seconds, whole), readable_difference(whole[1] - whole[0]), "", ""))
    columns = ("part", "predicted", "measured", "difference", "hidden, predicted", "hidden, measured")
    yield table(title, columns, rows, optional=("hidden, measured", "hidden, predicted"))
    if comparison.usual_seconds:
        first, last = comparison.measured.numbers[0], comparison.measured.numbers[-1]
        usual = readable_seconds(comparison.usual_seconds)
        yield f"Profiled: steps {first} to {last}. Other steps of the run take {usual} (median)."
    if comparison.memory:
        cells = [
            (
                part.name,
                *map(readable_bytes, (part.predicted, part.measured)),
                f"{part.measured / part.predicted:.2f}" if part.predicted else "–",
            )
            for part in comparison.memory
        ]
        yield table("Memory", ("", "predicted", "measured", "measured / predicted"), cells)
    whole_records = [traffic for traffic in comparison.sent if not traffic.unrecorded]
    if whole_records:
        cells = [
            (
                ", ".join(traffic.dimensions),
                f"{traffic.collectives:,.0f}",
                *map(readable_bytes, (traffic.planned, traffic.recorded)),
            )
            for traffic in whole_records
        ]
        yield table("Sent in a step, by the backend's own record", _SENT_COLUMNS, cells)
    for traffic in comparison.sent:
        if traffic.unrecorded:
            yield (
                f"Sent as messages, which the backend does not record: {', '.join(traffic.unrecorded)} "
                f"({', '.join(traffic.dimensions)})."
            )
    if len(comparison.measured.ranks) > 1:
        yield _ranks(comparison)
    if comparison.differences:
        cells = [
            (MEASURED_WORDS.get(part.name, part.name), readable_difference(part.difference), part.cause)
            for part in comparison.differences
        ]
        yield table("Largest differences first", ("part", "a step", "likely cause"), cells, numbers_from=9)
    for line in verdicts(comparison):
        yield Line(line, "bold")
    if trace is not None:
        yield f"Both timelines: {trace} (open it in ui.perfetto.dev)"


def _ranks(comparison: Comparison) -> FittedTable:
    ranks = sorted(comparison.measured.ranks, key=lambda rank: rank.waits)[:_MOST_RANKS]
    columns: dict[str, Callable[[RankTimes], str]] = {
        "rank": lambda rank: str(rank.rank),
        "compute": lambda rank: readable_seconds(rank.parts.get("compute", 0.0)),
        "waits for others": lambda rank: readable_seconds(rank.waits),
        "a layer forward": lambda rank: _optional(rank.layer_seconds),
        "times the median rank's": lambda rank: (
            "–" if comparison.slowness is None else f"{comparison.slowness[rank.rank]:.2f}"
        ),
    }
    return table_of("Ranks: the others wait for the rank that waits least", ranks, columns)


def verdicts(comparison: Comparison) -> list[str]:
    """Findings to act on, a line each."""
    lines = []
    if comparison.slow_rank is not None and comparison.slowness is not None:
        rank, times = comparison.slow_rank, comparison.slowness[comparison.slow_rank]
        node = comparison.measured.records[rank].node
        lines.append(f"Slow rank: {rank} (node {node}) takes {times:.2f} times as long for a layer as the median rank.")
    if comparison.slow_link is not None:
        slow = comparison.slow_link
        link = slow.link
        took, size = readable_seconds(link.seconds), readable_bytes(link.bytes)
        lines.append(
            f"Slow link: between {link.between}, {slow.times:.1f} times as long as {slow.than} "
            f"({link.dimension}: {link.what}, {size} in {took})."
        )
    if comparison.mismatch is not None:
        lines.append(comparison.mismatch)
    if comparison.missing_steps:
        lines.append(f"metrics.jsonl has no line for step {comparison.missing_steps}.")
    return lines


def _optional(seconds: float | None) -> str:
    return "–" if seconds is None else readable_seconds(seconds)


# -- the cost model scored on training runs ----------------------------------------------------------


# -- training runs -----------------------------------------------------------------------------------------


@paged
def runs_page(runs: ScoredRuns) -> Iterator[Piece | str]:
    optional = ("range", "memory predicted", "from")
    yield table("Step time and memory", _COLUMNS, map(_row, runs.rows), numbers_from=2, optional=optional)
    devices = [_summary_row(device, summary) for device, summary in runs.by_device.items()]
    yield table("Per device", _SUMMARY, devices, optional=("ranged", "in range", "memory, worst", "worst"))
    if runs.coverage:
        yield table_of("Reports in the error bar, by its class", runs.coverage, _COVERAGE, numbers_from=2)
    if runs.choices:
        yield table_of("Layouts of one job", runs.choices, _CHOICES, optional=("sequences", "layouts"))
    yield from _remarks(runs)


def runs_data(runs: ScoredRuns) -> dict[str, Any]:
    total = runs.total
    ranges = {"rows": total.ranged_rows, "in_range": total.in_range} if total else {"rows": 0, "in_range": None}
    return {
        **picked(runs, "rows", summary="by_device"),
        "ranges": ranges,
        **picked(runs, "coverage", "choices", "choice", "not_scored"),
    }


_COLUMNS = (
    *("row", "from", "reported", "predicted", "error", "error bar", "range"),
    *("memory", "memory predicted", "memory error", "memory bar"),
)
_SUMMARY = (
    *("device", "rows", "time, mean", "worst", "bias", "source left out"),
    *("memory, mean", "memory, worst", "ranged", "in range"),
)
_COVERAGE: dict[str, Callable[[Coverage], str]] = {
    "of": lambda coverage: coverage.what,
    "class": lambda coverage: coverage.of,
    "rows": lambda coverage: str(coverage.rows),
    "in the bar": lambda coverage: f"{coverage.in_bar:.0%}",
}
_CHOICES: dict[str, Callable[[LayoutChoice], str]] = {
    "job": lambda choice: f"{choice.model}, {choice.devices} {choice.device}, {choice.source}",
    "sequences": lambda choice: f"{choice.sequences:,}",
    "layouts": lambda choice: str(choice.layouts),
    "slower than the best": lambda choice: f"{choice.regret:.1%}",
    "rank correlation": lambda choice: "" if choice.rank_correlation is None else f"{choice.rank_correlation:.2f}",
}


def _row(score: Score) -> tuple[str, ...]:
    bar, between, memory = "", "", ("", "", "", "")
    if score.in_bar is not None:
        bar = _between(score.bar_low_seconds, score.bar_high_seconds) + ("" if score.in_bar else " !")
    if score.predicted_seconds_low is not None and score.predicted_seconds_high is not None:
        between = _between(score.predicted_seconds_low, score.predicted_seconds_high) + ("" if score.in_range else " !")
    if score.reported_memory_bytes is not None and score.memory_error is not None:
        ends = f"{readable_bytes(score.bar_low_bytes)}-{readable_bytes(score.bar_high_bytes)}"
        memory = (
            readable_bytes(score.reported_memory_bytes),
            readable_bytes(score.predicted_memory_bytes),
            readable_change(score.memory_error),
            ends + ("" if score.memory_in_bar else " !"),
        )
    return (
        score.row_id + (" *" if score.set_aside else ""),
        score.reported_from,
        "" if score.reported_seconds is None else readable_seconds(score.reported_seconds),
        readable_seconds(score.predicted_seconds),
        "" if score.time_error is None else readable_change(score.time_error),
        bar,
        between,
        *memory,
    )


def _between(low: float, high: float) -> str:
    """ "1.20-1.45 s": the unit once where both have the same."""
    (least, unit), (most, same) = readable_seconds(low).split(), readable_seconds(high).split()
    return f"{least}-{most} {unit}" if unit == same else f"{least} {unit}-{most} {same}"


def _summary_row(device: str, summary: Summary) -> tuple[str, ...]:
    def share(value: float | None, form: str = ".1%") -> str:
        return "" if value is None else f"{value:{form}}"

    return (
        device,
        str(summary.rows),
        share(summary.time_mape),
        share(summary.time_worst),
        "" if summary.time_bias is None else readable_change(summary.time_bias),
        share(summary.left_out_mape),
        share(summary.memory_mape),
        share(summary.memory_worst),
        str(summary.ranged_rows) if summary.ranged_rows else "",
        share(summary.in_range, ".0%"),
    )


def _remarks(runs: ScoredRuns) -> Iterable[str]:
    total, choice = runs.total, runs.choice
    if total and total.in_range is not None:
        yield (
            f"ranges over what the source does not print: {total.in_range:.0%} of {total.ranged_rows} rows contain the "
            "report (! marks the others)"
        )
    if choice:
        ranks = "" if choice.mean_rank_correlation is None else f", rank correlation {choice.mean_rank_correlation:.2f}"
        yield (
            f"the layout ranked first is {choice.mean_regret:.1%} slower than the fastest measured one in the mean of "
            f"{choice.jobs} jobs, {choice.worst_regret:.1%} in the worst{ranks}"
        )
    if refusals := [score.row_id for score in runs.rows if not score.fits]:
        yield f"do not fit in memory as predicted, of {len(runs.rows)} that ran: {', '.join(refusals)}"
    for score in runs.rows:
        if score.set_aside:
            yield f"scored apart (*): {score.row_id}: {score.set_aside}"
    for refused in runs.not_scored:
        yield f"not scored: {refused.row_id}: {refused.reason}"


# -- collectives and bubbles -------------------------------------------------------------------------------


_ERRORS: dict[str, tuple[str, dict[str, Callable[[Any], str]]]] = {
    "collectives": (
        "All-reduces from 1 MiB",
        {
            "machine": lambda row: row.machine,
            "algorithm": lambda row: row.predicted_algorithm,
            "devices": lambda row: str(row.devices),
            "size": lambda row: readable_bytes(row.size_bytes),
            "measured": lambda row: readable_seconds(row.measured_seconds),
            "predicted": lambda row: readable_seconds(row.predicted_seconds),
            "error": lambda row: readable_change(row.error),
        },
    ),
    "bubbles": (
        "Bubble rates",
        {
            "model": lambda row: row.model,
            "schedule": lambda row: row.schedule,
            "microbatches": lambda row: str(row.microbatches),
            "reported": lambda row: f"{row.reported:.2%}",
            "simulated": lambda row: f"{row.simulated:.2%}",
            "difference": lambda row: readable_change(row.error, 2),
        },
    ),
}


def errors_page(kind: str, rows: Sequence[Any], summary: Mapping[str, ErrorSummary]) -> Page:
    title, columns = _ERRORS[kind]
    shares = [(name, str(errors.rows), f"{errors.mean:.2%}", f"{errors.worst:.2%}") for name, errors in summary.items()]
    absolute = table("Absolute error", ("group", "rows", "mean", "worst"), shares)
    return Page((table_of(title, rows, columns, numbers_from=2), absolute))
