"""The cost model's errors on published or measured runs, as a page and as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Page, Piece, paged
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds

if TYPE_CHECKING:
    from shardwise.accuracy.scores import Coverage, ErrorSummary, LayoutChoice, Score, ScoredRuns, Summary

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
    """Every row of a table of this ``kind``, then the absolute errors of each group and overall."""
    title, columns = _ERRORS[kind]
    shares = [(name, str(errors.rows), f"{errors.mean:.2%}", f"{errors.worst:.2%}") for name, errors in summary.items()]
    absolute = table("Absolute error", ("group", "rows", "mean", "worst"), shares)
    return Page((table_of(title, rows, columns, numbers_from=2), absolute))
