"""How far the cost model is off on published or measured runs, as a page and as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.report.console import table, table_of
from shardwise.report.page import Page, Piece, paged
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds

if TYPE_CHECKING:
    from shardwise.accuracy.choices import LayoutChoice
    from shardwise.accuracy.scored import Coverage, ScoredRuns
    from shardwise.accuracy.scores import ErrorSummary, Score, Summary

# -- training runs -----------------------------------------------------------------------------------------


@paged
def runs_page(found: ScoredRuns) -> Iterator[Piece | str]:
    optional = ("range", "memory predicted", "from")
    yield table("Step time and memory", _COLUMNS, map(_row, found.rows), numbers_from=2, optional=optional)
    devices = [_summary_row(device, one) for device, one in found.by_device.items()]
    yield table("Per device", _SUMMARY, devices, optional=("ranged", "in range", "memory, worst", "worst"))
    if found.coverage:
        yield table_of("Reports in the error bar, by its class", found.coverage, _COVERAGE, numbers_from=2)
    if found.choices:
        yield table_of("Layouts of one job", found.choices, _CHOICES, optional=("sequences", "layouts"))
    yield from _remarks(found)


def runs_data(found: ScoredRuns) -> dict[str, Any]:
    total = found.total
    ranges = {"rows": total.ranged_rows, "in_range": total.in_range} if total else {"rows": 0, "in_range": None}
    return {
        "rows": [asdict(one) for one in found.rows],
        "summary": {device: asdict(one) for device, one in found.by_device.items()},
        "ranges": ranges,
        "coverage": [asdict(one) for one in found.coverage],
        "choices": [asdict(one) for one in found.choices],
        "choice": asdict(found.choice) if found.choice else None,
        "not_scored": [asdict(one) for one in found.not_scored],
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
    "of": lambda one: one.what,
    "class": lambda one: one.of,
    "rows": lambda one: str(one.rows),
    "in the bar": lambda one: f"{one.in_bar:.0%}",
}
_CHOICES: dict[str, Callable[[LayoutChoice], str]] = {
    "job": lambda one: f"{one.model}, {one.devices} {one.device}, {one.source}",
    "sequences": lambda one: f"{one.sequences:,}",
    "layouts": lambda one: str(one.layouts),
    "slower than the best": lambda one: f"{one.regret:.1%}",
    "rank correlation": lambda one: "" if one.rank_correlation is None else f"{one.rank_correlation:.2f}",
}


def _row(one: Score) -> tuple[str, ...]:
    bar, between, memory = "", "", ("", "", "", "")
    if one.in_bar is not None:
        bar = _between(one.bar_low_seconds, one.bar_high_seconds) + ("" if one.in_bar else " !")
    if one.predicted_seconds_low is not None and one.predicted_seconds_high is not None:
        between = _between(one.predicted_seconds_low, one.predicted_seconds_high) + ("" if one.in_range else " !")
    if one.reported_memory_bytes is not None and one.memory_error is not None:
        ends = f"{readable_bytes(one.bar_low_bytes)}-{readable_bytes(one.bar_high_bytes)}"
        memory = (
            readable_bytes(one.reported_memory_bytes),
            readable_bytes(one.predicted_memory_bytes),
            readable_change(one.memory_error),
            ends + ("" if one.memory_in_bar else " !"),
        )
    return (
        one.row_id + (" *" if one.set_aside else ""),
        one.reported_from,
        "" if one.reported_seconds is None else readable_seconds(one.reported_seconds),
        readable_seconds(one.predicted_seconds),
        "" if one.time_error is None else readable_change(one.time_error),
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


def _remarks(found: ScoredRuns) -> Iterable[str]:
    total, choice = found.total, found.choice
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
    if refusals := [one.row_id for one in found.rows if not one.fits]:
        yield f"do not fit in memory as predicted, of {len(found.rows)} that ran: {', '.join(refusals)}"
    for one in found.rows:
        if one.set_aside:
            yield f"scored apart (*): {one.row_id}: {one.set_aside}"
    for refused in found.not_scored:
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
    """Every row of a table of this ``kind``, then the absolute errors of every group and of all."""
    title, columns = _ERRORS[kind]
    shares = [(name, str(one.rows), f"{one.mean:.2%}", f"{one.worst:.2%}") for name, one in summary.items()]
    absolute = table("Absolute error", ("group", "rows", "mean", "worst"), shares)
    return Page((table_of(title, rows, columns, numbers_from=2), absolute))


def errors_data(rows: Sequence[Any], summary: Mapping[str, ErrorSummary]) -> dict[str, Any]:
    return {
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "summary": {name: asdict(one) for name, one in summary.items()},
    }
