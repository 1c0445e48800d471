"""An explanation of one formula, as a page and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.console import table
from shardwise.report.explain.quantity import Quantity
from shardwise.report.page import Line, Page, Piece
from shardwise.report.tables import Bar, Cell

Value = str | Quantity | Bar


@dataclass(frozen=True)
class GridTable:
    """A small table inside an explanation; the first ``words`` columns hold text.

    ``columns`` are headings with the names of the columns in the JSON, which say the unit of what stands in them.
    """

    title: str
    columns: Mapping[str, str]
    rows: tuple[tuple[Value, ...], ...]
    words: int = 1
    optional: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """A row has what it says something of: neither bars nor empty cells."""
        rows = [{key: _data(cell) for key, cell in zip(self.columns.values(), row)
                 if not isinstance(cell, Bar) and cell != ""} for row in self.rows]  # fmt: skip
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Explanation:
    """One formula: in symbols, with the numbers put in, its result, its source, and a drawing."""

    title: str
    formula: tuple[str, ...]
    source: tuple[str, ...]
    numbers: tuple[tuple[str, str, Quantity], ...] = ()  # symbol, meaning, value
    result: tuple[tuple[str, Quantity], ...] = ()
    tables: tuple[GridTable, ...] = ()
    remarks: tuple[str, ...] = ()
    drawing: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every number under the name of its unit."""
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

    def page(self) -> Page:
        return Page.of(self._pieces())

    def _pieces(self) -> Iterator[Piece | str]:
        yield Line(self.title, "bold")
        yield from _lines("formula", self.formula)
        if self.numbers:
            rows = [(symbol, meaning, value.text) for symbol, meaning, value in self.numbers]
            yield table("numbers", ("symbol", "meaning", "value"), rows, numbers_from=2)
        if self.result:
            yield table("result", ("what", "value"), [(what, value.text) for what, value in self.result])
        for grid in self.tables:
            cells = [[_cell(value) for value in row] for row in grid.rows]
            yield table(grid.title, grid.columns, cells, numbers_from=grid.words, optional=grid.optional)
        yield from _lines("remarks", self.remarks)
        if self.drawing:
            yield Line(self.drawing + "\n", fixed=True)
        yield from _lines("source", self.source)


def _cell(value: Value) -> Cell:
    return value.text if isinstance(value, Quantity) else value


def _data(value: Value) -> str | int | float:
    return value.data if isinstance(value, Quantity) else str(value)


def _lines(heading: str, lines: tuple[str, ...]) -> Iterator[Piece]:
    if lines:
        yield Line(heading, "italic")
        yield Line("\n".join(f"  {line}" for line in lines) + "\n")
