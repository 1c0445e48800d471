"""What an explanation is, and how it is printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from shardwise.report.console import table


@dataclass(frozen=True)
class Grid:
    """A small table inside an explanation; the first ``words`` columns hold text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclass(frozen=True)
class Explanation:
    """One formula: in symbols, with the numbers put in, its result, its source, and a drawing."""

    title: str
    formula: tuple[str, ...]
    numbers: tuple[tuple[str, str, str], ...]  # symbol, meaning, value
    result: tuple[tuple[str, str], ...]
    source: tuple[str, ...]
    tables: tuple[Grid, ...] = ()
    remarks: tuple[str, ...] = ()
    drawing: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def print(self, out: Console) -> None:
        out.print(self.title, style="bold", markup=False)
        _lines(out, "formula", self.formula)
        if self.numbers:
            rows = [(symbol, meaning, value) for symbol, meaning, value in self.numbers]
            out.print(table("numbers", ("symbol", "meaning", "value"), rows, numbers_from=2))
        if self.result:
            out.print(table("result", ("what", "value"), self.result))
        for grid in self.tables:
            out.print(table(grid.title, grid.columns, grid.rows, numbers_from=grid.words))
        _lines(out, "remarks", self.remarks)
        if self.drawing:
            out.print(self.drawing, markup=False, no_wrap=True, overflow="ignore", crop=False)
            out.print()
        _lines(out, "source", self.source)


def _lines(out: Console, heading: str, lines: tuple[str, ...]) -> None:
    if lines:
        out.print(heading, style="italic")
        for line in lines:
            out.print(f"  {line}", markup=False)
        out.print()
