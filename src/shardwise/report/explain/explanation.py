"""What an explanation is, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from shardwise.report.console import table
from shardwise.report.explain.quantity import Quantity
from shardwise.report.tables import Bar, Cell

Value = str | Quantity | Bar


@dataclass(frozen=True)
class Grid:
    """A small table inside an explanation; the first ``words`` columns hold text.

    ``keys`` name the columns in the JSON, with the unit of what stands in them.
    """

    title: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    words: int = 1
    optional: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        rows = [{key: _data(cell) for key, cell in zip(self.keys, row) if not isinstance(cell, Bar)}
                for row in self.rows]  # fmt: skip
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Explanation:
    """One formula: in symbols, with the numbers put in, its result, its source, and a drawing."""

    title: str
    formula: tuple[str, ...]
    numbers: tuple[tuple[str, str, Quantity], ...]  # symbol, meaning, value
    result: tuple[tuple[str, Quantity], ...]
    source: tuple[str, ...]
    tables: tuple[Grid, ...] = ()
    remarks: tuple[str, ...] = ()
    drawing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For a machine: every number under the name of its unit."""
        return {
            "title": self.title,
            "formula": list(self.formula),
            "numbers": [
                {"symbol": symbol, "meaning": meaning, value.unit: value.data}
                for symbol, meaning, value in self.numbers
            ],
            "result": [{"what": what, value.unit: value.data} for what, value in self.result],
            "tables": [grid.data() for grid in self.tables],
            "remarks": list(self.remarks),
            "drawing": self.drawing,
            "source": list(self.source),
        }

    def print(self, out: Console) -> None:
        out.print(self.title, style="bold", markup=False)
        _lines(out, "formula", self.formula)
        if self.numbers:
            rows = [(symbol, meaning, value.text) for symbol, meaning, value in self.numbers]
            out.print(table("numbers", ("symbol", "meaning", "value"), rows, numbers_from=2))
        if self.result:
            out.print(table("result", ("what", "value"), [(what, value.text) for what, value in self.result]))
        for grid in self.tables:
            cells = [[_cell(value) for value in row] for row in grid.rows]
            out.print(table(grid.title, grid.columns, cells, numbers_from=grid.words, optional=grid.optional))
        _lines(out, "remarks", self.remarks)
        if self.drawing:
            out.print(self.drawing, markup=False, no_wrap=True, overflow="ignore", crop=False)
            out.print()
        _lines(out, "source", self.source)


def _cell(value: Value) -> Cell:
    return value.text if isinstance(value, Quantity) else value


def _data(value: Value) -> str | int | float:
    return value.data if isinstance(value, Quantity) else str(value)


def _lines(out: Console, heading: str, lines: tuple[str, ...]) -> None:
    if lines:
        out.print(heading, style="italic")
        for line in lines:
            out.print(f"  {line}", markup=False)
        out.print()
