"""Measured collectives as a table, as CSV and as data."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardwise.report.console import spoken, table
from shardwise.report.page import Page
from shardwise.spec.units import readable_bytes, readable_rate, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.collectives.request import MeasuredCollective

COLUMNS = ("level", "collective", "algorithm", "ranks", "size_bytes", "repeats", "median_seconds", "least_seconds",
           "algorithm_bandwidth", "bus_bandwidth", "predicted_seconds", "right")  # fmt: skip


def measured_page(measured: Sequence[MeasuredCollective]) -> Page:
    """A table for each collective and network level."""
    tables = []
    for (level, kind, ranks), some in groupby(measured, key=lambda one: (one.level, one.kind, one.ranks)):
        title = f"{kind.replace('_', '-')} over {level}: {ranks} ranks"
        heads = ("algorithm", "size", "median", "least", "algbw", "busbw", "model", "median/model", "result")
        rows = sorted(some, key=lambda one: (one.size_bytes, one.median_seconds))
        tables.append(table(title, heads, map(_row, rows), optional=("least", "algbw", "model")))
    return Page(tuple(tables))


def _row(one: MeasuredCollective) -> tuple[str, ...]:
    model = one.predicted_seconds
    return (
        spoken(one.algorithm),
        readable_bytes(one.size_bytes),
        readable_seconds(one.median_seconds),
        readable_seconds(one.least_seconds),
        readable_rate(one.algorithm_bandwidth),
        readable_rate(one.bus_bandwidth),
        "" if model is None else readable_seconds(model),
        "" if not model else f"{one.median_seconds / model:.2f}",
        "right" if one.right else "WRONG",
    )


def measured_data(measured: Sequence[MeasuredCollective]) -> list[dict[str, Any]]:
    """One entry for every collective, algorithm and size."""
    return [{name: getattr(one, "kind" if name == "collective" else name) for name in COLUMNS} for one in measured]


def measured_csv(measured: Sequence[MeasuredCollective]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(measured_data(measured))
    return text.getvalue()
