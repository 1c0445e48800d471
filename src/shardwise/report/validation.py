"""How far the cost model is off on published or measured runs, as a page and as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.report.console import table, table_of
from shardwise.report.page import Page, Piece, paged
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.accuracy.scores import ErrorSummary, Score, Summary

# -- training runs -----------------------------------------------------------------------------------------


@paged
def runs_page(
    scores: Sequence[Score], by_device: Mapping[str, Summary], total: Summary | None
) -> Iterator[Piece | str]:
    yield table("Step time and memory", _COLUMNS, map(_row, scores), numbers_from=2, optional=("from", "range"))
    yield table("Per device", _SUMMARY, [_summary_row(device, one) for device, one in by_device.items()])
    yield from _remarks(scores, total)


def runs_data(scores: Sequence[Score], by_device: Mapping[str, Summary], total: Summary | None) -> dict[str, Any]:
    ranges = {"rows": total.ranged_rows, "in_range": total.in_range} if total else {"rows": 0, "in_range": None}
    return {
        "rows": [asdict(one) for one in scores],
        "summary": {device: asdict(one) for device, one in by_device.items()},
        "ranges": ranges,
    }


_COLUMNS = ("row", "from", "reported", "predicted", "error", "range", "memory", "memory predicted", "memory error")
_SUMMARY = ("device", "rows", "time, mean", "worst", "bias", "memory, mean", "memory, worst", "ranged", "in range")


def _row(one: Score) -> tuple[str, ...]:
    between, memory = "", ("", "", "")
    if one.predicted_seconds_low is not None and one.predicted_seconds_high is not None:
        between = _between(one.predicted_seconds_low, one.predicted_seconds_high) + ("" if one.in_range else " !")
    if one.reported_memory_bytes is not None and one.memory_error is not None:
        memory = (
            readable_bytes(one.reported_memory_bytes),
            readable_bytes(one.predicted_memory_bytes),
            readable_change(one.memory_error),
        )
    return (
        one.row_id + (" *" if one.set_aside else ""),
        one.reported_from,
        "" if one.reported_seconds is None else readable_seconds(one.reported_seconds),
        readable_seconds(one.predicted_seconds),
        "" if one.time_error is None else readable_change(one.time_error),
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
        share(summary.memory_mape),
        share(summary.memory_worst),
        str(summary.ranged_rows) if summary.ranged_rows else "",
        share(summary.in_range, ".0%"),
    )


def _remarks(scores: Sequence[Score], total: Summary | None) -> Iterable[str]:
    if total and total.in_range is not None:
        yield (
            f"ranges over what the source does not print: {total.in_range:.0%} of {total.ranged_rows} rows contain the "
            "report (! marks the others)"
        )
    for one in scores:
        if not one.fits:
            yield f"does not fit in memory as predicted: {one.row_id}"
    for one in scores:
        if one.set_aside:
            yield f"scored apart (*): {one.row_id}: {one.set_aside}"


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
