"""`shardwise validate`: score the cost model on a table of published or measured runs."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.validation.scores import Score, Summary


def run(arguments: list[str]) -> int:
    parser = Parser(
        "validate",
        "Scores the cost model on a table of training runs, of collectives, or of pipeline bubbles.",
        "shardwise validate validation/training_runs.csv",
    )
    parser.add_argument("table", help="CSV in the layout of validation/*.csv")
    parser.add_argument("--json", action="store_true", help="the same for a machine")
    parsed = parser.parse(arguments)
    columns = _columns(parsed.table)
    try:
        if "bubble_rate" in columns:
            return _bubbles(parsed.table, parsed.json)
        if "collective" in columns:
            return _collectives(parsed.table, parsed.json)
        return _runs(parsed.table, parsed.json)
    except (KeyError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        what = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SpecError("table", what, "compare it with validation/*.csv") from None


def _columns(path: str) -> list[str]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])
    except FileNotFoundError:
        raise SpecError("table", f"{shown(path)} is not there", "check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error):
        raise SpecError("table", f"{shown(path)} is not a CSV table", "check the file") from None


def _runs(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.runs import read_runs
    from shardwise.cost.validation.scores import score, summarize

    scores = [score(one) for one in read_runs(path)]
    if not scores:
        raise SpecError("table", f"{shown(path)} has no rows", "give at least one")
    summary = summarize(scores)
    if as_json:
        data = {"rows": [asdict(one) for one in scores], "summary": {k: asdict(v) for k, v in summary.items()}}
        print(json.dumps(data, indent=2))
        return 0
    from shardwise.report.console import console, table

    out = console()
    columns = ("row", "from", "reported", "predicted", "error", "reported memory", "predicted", "error")
    out.print(table("Step time and memory", columns, map(_row, scores), numbers_from=2))
    out.print(table("Per device", _SUMMARY, [_summary_row(k, v) for k, v in summary.items()]))
    for one in scores:
        if one.set_aside:
            out.print(f"scored apart: {one.row_id}: {one.set_aside}", markup=False)
    return 0


_SUMMARY = ("device", "rows", "time, mean", "worst", "bias", "memory, mean", "worst")


def _row(one: Score) -> tuple[str, ...]:
    memory = ("", "", "")
    if one.reported_memory_bytes is not None and one.memory_error is not None:
        memory = (
            readable_bytes(one.reported_memory_bytes),
            readable_bytes(one.predicted_memory_bytes),
            f"{one.memory_error:+.1%}",
        )
    return (
        one.row_id + (" *" if one.set_aside else ""),
        one.reported_from,
        readable_seconds(one.reported_seconds),
        readable_seconds(one.predicted_seconds),
        f"{one.time_error:+.1%}",
        *memory,
    )


def _summary_row(device: str, summary: Summary) -> tuple[str, ...]:
    def share(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value:{sign}.1%}"

    return (
        device,
        str(summary.rows),
        share(summary.time_mape),
        share(summary.time_worst),
        share(summary.time_bias, "+"),
        share(summary.memory_mape),
        share(summary.memory_worst),
    )


def _collectives(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.collectives import score_all_reduces

    rows = score_all_reduces(path)
    return _print(rows, as_json, lambda row: row.machine, "All-reduces from 1 MiB", [abs(row.error) for row in rows])


def _bubbles(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.bubbles import score_bubbles

    rows = score_bubbles(path)
    return _print(
        rows, as_json, lambda row: row.schedule, "Bubble rates (difference)", [abs(row.error) for row in rows]
    )


def _print(rows: list[Any], as_json: bool, group: Any, title: str, errors: list[float]) -> int:
    if not rows:
        raise SpecError("table", "has no rows that can be scored", "compare it with validation/*.csv")
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors):
        groups.setdefault(group(row), []).append(error)
    groups["all"] = errors
    summary = {name: {"rows": len(own), "mean": sum(own) / len(own), "worst": max(own)} for name, own in groups.items()}
    if as_json:
        data = [{**asdict(row), "error": row.error} for row in rows]
        print(json.dumps({"rows": data, "summary": summary}, indent=2))
        return 0
    from shardwise.report.console import console, table

    lines = [(name, str(one["rows"]), f"{one['mean']:.2%}", f"{one['worst']:.2%}") for name, one in summary.items()]
    console().print(table(title, ("group", "rows", "mean error", "worst"), lines))
    return 0
