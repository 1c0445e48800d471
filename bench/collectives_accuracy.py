"""Prints predicted against published all-reduce times; exit 1 beyond 10% mean or 25% worst."""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.cost.validation.collectives import ScoredRow, score_all_reduces
from shardwise.report.console import console, table
from shardwise.spec.units import readable_bytes, readable_seconds

TABLE = Path(__file__).parent.parent / "validation" / "collectives.csv"


def main() -> int:
    rows = score_all_reduces(TABLE)
    out = console()
    out.print(table("All-reduce from 1 MiB, one description per machine", COLUMNS, map(_shown, rows), numbers_from=2))
    machines = dict.fromkeys(row.machine for row in rows)
    summary = [_summary(name, [row for row in rows if row.machine == name]) for name in machines]
    out.print(table("Error", ("machine", "rows", "mean", "worst"), [*summary, _summary("all", rows)]))
    errors = [abs(row.error) for row in rows]
    return int(sum(errors) / len(errors) > 0.10 or max(errors) > 0.25)


COLUMNS = ("machine", "algorithm", "devices", "size", "measured", "predicted", "error")


def _shown(row: ScoredRow) -> tuple[str, ...]:
    return (
        row.machine,
        row.predicted_algorithm,
        str(row.devices),
        readable_bytes(row.size_bytes),
        readable_seconds(row.measured_seconds),
        readable_seconds(row.predicted_seconds),
        f"{row.error:+.1%}",
    )


def _summary(name: str, rows: list[ScoredRow]) -> tuple[str, str, str, str]:
    errors = [abs(row.error) for row in rows]
    return name, str(len(rows)), f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}"


if __name__ == "__main__":
    sys.exit(main())
