"""Measured collectives as a table, as CSV and as data."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardwise.report.console import console, spoken, table
from shardwise.spec.units import readable_bytes, readable_rate, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.collectives.request import MeasuredCollective

COLUMNS = ("level", "collective", "algorithm", "ranks", "size_bytes", "repeats", "median_seconds", "least_seconds",
           "algorithm_bandwidth", "bus_bandwidth", "predicted_seconds", "right")  # fmt: skip


def print_measured(measured: Sequence[MeasuredCollective]) -> None:
    out = console()
    for (level, kind, ranks), some in groupby(measured, key=lambda one: (one.level, one.kind, one.ranks)):
        title = f"{kind.replace('_', '-')} over {level}: {ranks} ranks"
        heads = ("algorithm", "size", "median", "least", "algbw", "busbw", "model", "median/model", "result")
        rows = sorted(some, key=lambda one: (one.size_bytes, one.median_seconds))
        out.print(table(title, heads, (_row(one) for one in rows), optional=("least", "algbw", "model")))


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
    return [
        {
            "level": one.level,
            "collective": one.kind,
            "algorithm": one.algorithm,
            "ranks": one.ranks,
            "size_bytes": one.size_bytes,
            "repeats": one.repeats,
            "median_seconds": one.median_seconds,
            "least_seconds": one.least_seconds,
            "algorithm_bandwidth": one.algorithm_bandwidth,
            "bus_bandwidth": one.bus_bandwidth,
            "predicted_seconds": one.predicted_seconds,
            "right": one.right,
        }
        for one in measured
    ]


def measured_csv(measured: Sequence[MeasuredCollective]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(measured_data(measured))
    return text.getvalue()
