"""`shardwise validate`: score the cost model on a table of published or measured runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import Parser
from shardwise.cost.validation.table import FOLDER, SCORED, table_path
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.validation.bubbles import ScoredBubble
    from shardwise.cost.validation.collectives import ScoredRow
    from shardwise.cost.validation.scores import Score, Summary


def run(arguments: list[str]) -> int:
    parser = Parser(
        "validate",
        "Scores the cost model on a table of training runs, of collectives, or of pipeline bubbles.",
        "shardwise validate\nshardwise validate collectives\nshardwise validate my_runs.csv",
    )
    names = f"{', '.join(SCORED)} (which come with the package; default: the first), or a CSV in the layout of one"
    parser.add_argument("table", nargs="?", default=SCORED[0], help=names)
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    path = str(table_path(parsed.table))
    layout = _layout(path)
    if layout == "bubbles":
        return _bubbles(path, parsed.json)
    if layout == "collectives":
        return _collectives(path, parsed.json)
    return _runs(path, parsed.json)


def _layout(path: str) -> str:
    """What the table holds: the layout that shares most columns with it."""
    from shardwise.cost.validation import bubbles, collectives, runs
    from shardwise.cost.validation.table import columns_of

    present = set(columns_of(path))
    layouts = {"runs": runs.COLUMNS, "bubbles": bubbles.COLUMNS, "collectives": collectives.COLUMNS}
    return max(layouts, key=lambda name: len(present.intersection(layouts[name])) / len(layouts[name]))


# -- training runs -----------------------------------------------------------------------------------------


def _runs(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.ranges import predicted_range
    from shardwise.cost.validation.runs import read_runs
    from shardwise.cost.validation.scores import score, summarize, summary

    scores = [score(one, predicted_range(one)) for one in list(read_runs(path))]
    by_device = summarize(scores)
    scored = [one for one in scores if not one.set_aside]
    total = summary(scored) if scored else None
    if as_json:
        ranges = {"rows": total.ranged_rows, "in_range": total.in_range} if total else {"rows": 0, "in_range": None}
        data = {
            "rows": [asdict(one) for one in scores],
            "summary": {device: asdict(one) for device, one in by_device.items()},
            "ranges": ranges,
        }
        print(json.dumps(data, indent=2))
        return 0
    from shardwise.report.console import console, table

    out = console()
    out.print(table("Step time and memory", _COLUMNS, map(_row, scores), numbers_from=2, optional=("from", "range")))
    out.print(table("Per device", _SUMMARY, [_summary_row(device, one) for device, one in by_device.items()]))
    for line in _remarks(scores, total):
        out.print(line, markup=False)
    return 0


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
        readable_seconds(one.reported_seconds),
        readable_seconds(one.predicted_seconds),
        readable_change(one.time_error),
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


def _remarks(scores: list[Score], total: Summary | None) -> Iterable[str]:
    if total and total.in_range is not None:
        yield (
            f"ranges over what the source does not print: {total.in_range:.0%} of {total.ranged_rows} rows contain the "
            "report (! where not)"
        )
    for one in scores:
        if not one.fits:
            yield f"does not fit in memory as predicted: {one.row_id}"
    for one in scores:
        if one.set_aside:
            yield f"scored apart (*): {one.row_id}: {one.set_aside}"


# -- collectives and bubbles -------------------------------------------------------------------------------


def _collectives(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.collectives import score_all_reduces

    def shown(row: ScoredRow) -> tuple[str, ...]:
        return (
            row.machine,
            row.predicted_algorithm,
            str(row.devices),
            readable_bytes(row.size_bytes),
            readable_seconds(row.measured_seconds),
            readable_seconds(row.predicted_seconds),
            readable_change(row.error),
        )

    rows = score_all_reduces(path)
    columns = ("machine", "algorithm", "devices", "size", "measured", "predicted", "error")
    lines = [shown(row) for row in rows]
    return _print("All-reduces from 1 MiB", columns, lines, [(row.machine, row) for row in rows], as_json)


def _bubbles(path: str, as_json: bool) -> int:
    from shardwise.cost.validation.bubbles import score_bubbles

    def shown(row: ScoredBubble) -> tuple[str, ...]:
        return (
            row.model,
            row.schedule,
            str(row.microbatches),
            f"{row.reported:.2%}",
            f"{row.simulated:.2%}",
            readable_change(row.error, 2),
        )

    rows = score_bubbles(path)
    columns = ("model", "schedule", "microbatches", "reported", "simulated", "difference")
    lines = [shown(row) for row in rows]
    return _print("Bubble rates", columns, lines, [(row.schedule, row) for row in rows], as_json)


def _print(
    title: str, columns: tuple[str, ...], lines: list[tuple[str, ...]], grouped: list[tuple[str, Any]], as_json: bool
) -> int:
    """Every row, then the absolute errors of every group and of all."""
    if not grouped:
        raise SpecError("table", "has no rows that can be scored", f"compare it with {FOLDER}")
    groups: dict[str, list[float]] = {}
    for name, row in grouped:
        groups.setdefault(name, []).append(abs(row.error))
    groups["all"] = [abs(row.error) for _, row in grouped]
    summary = {name: {"rows": len(own), "mean": sum(own) / len(own), "worst": max(own)} for name, own in groups.items()}
    if as_json:
        data = [{**asdict(row), "error": row.error} for _, row in grouped]
        print(json.dumps({"rows": data, "summary": summary}, indent=2))
        return 0
    from shardwise.report.console import console, table

    out = console()
    out.print(table(title, columns, lines, numbers_from=2))
    shares = [(name, str(one["rows"]), f"{one['mean']:.2%}", f"{one['worst']:.2%}") for name, one in summary.items()]
    out.print(table("Absolute error", ("group", "rows", "mean", "worst"), shares))
    return 0
