"""An explanation of one formula, as a page and as plain data; the formula itself, and its quantities."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.report.console import table
from shardwise.report.page import Line, Page, Piece
from shardwise.report.tables import Bar
from shardwise.spec.units import readable_bytes, readable_flops, readable_rate, readable_seconds, readable_share

_TEXTS: dict[str, Callable[[float], str]] = {
    "number": lambda value: f"{value:,.0f}" if float(value).is_integer() else f"{value:g}",
    "seconds": readable_seconds,
    "bytes": readable_bytes,
    "bytes_per_second": readable_rate,
    "flops": readable_flops,
    "flops_per_second": lambda value: f"{readable_flops(value)}/s",
    "share": readable_share,
}


@dataclass(frozen=True)
class Quantity:
    """A number of an explanation: text for people, a plain number for machines."""

    value: float
    unit: str = "number"  # key of the number in the JSON
    shown: str = ""  # replaces the usual text of a number of this unit

    @property
    def text(self) -> str:
        return self.shown or _TEXTS[self.unit](self.value)

    @property
    def data(self) -> int | float:
        value = float(self.value)
        return int(value) if value.is_integer() else value


seconds = partial(Quantity, unit="seconds")
size = partial(Quantity, unit="bytes")
rate = partial(Quantity, unit="bytes_per_second")
flops = partial(Quantity, unit="flops")
flop_rate = partial(Quantity, unit="flops_per_second")
share = partial(Quantity, unit="share")


def number(value: float, shown: str = "") -> Quantity:
    return Quantity(value, "number", shown)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_PYTHON = str.maketrans({"·": "*", "−": "-"})


def chosen(things: float, drawn: float) -> float:
    """The binomial coefficient: ways to draw ``drawn`` of ``things``, 0 if there are fewer."""
    return math.prod(max(0.0, things - index) / (index + 1) for index in range(int(drawn)))


_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "C": chosen}


@dataclass(frozen=True)
class Formula:
    """A formula that is printed and computed from the same text."""

    name: str  # what it computes
    text: str  # symbols, numbers, + − · / and the functions min, max and C(n, k)
    symbol: str = ""  # stands for its value in the formulas after it

    def __str__(self) -> str:
        return f"{self.title} = {self.text}"

    @property
    def title(self) -> str:
        return f"{self.symbol} {self.name}" if self.symbol else self.name

    def value(self, numbers: Mapping[str, float]) -> float:
        def computed(node: ast.expr) -> float:
            if isinstance(node, ast.BinOp):
                return float(_OPERATORS[type(node.op)](computed(node.left), computed(node.right)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                return float(_FUNCTIONS[node.func.id](*map(computed, node.args)))
            if isinstance(node, ast.Name):
                return float(numbers[node.id])
            assert isinstance(node, ast.Constant)
            return float(node.value)  # type: ignore[arg-type]

        return computed(ast.parse(self.text.translate(_PYTHON), mode="eval").body)


Value = str | Quantity | Bar


@dataclass(frozen=True)
class GridTable:
    title: str
    columns: Mapping[str, str]  # headings, each with the key of its column in the JSON, which names the unit
    rows: tuple[tuple[Value, ...], ...]
    words: int = 1  # how many of the first columns hold text
    optional: tuple[str, ...] = ()  # columns that a narrow console drops, in this order

    def data(self) -> dict[str, Any]:
        """Rows as mappings, without bars and empty cells."""
        rows = [
            {
                key: cell.data if isinstance(cell, Quantity) else cell
                for key, cell in zip(self.columns.values(), row)
                if not isinstance(cell, Bar) and cell != ""
            }
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Explanation:
    """One formula: in symbols, with the numbers put in, its result, its source, and a drawing."""

    title: str
    formula: tuple[str, ...]
    source: tuple[str, ...]
    numbers: tuple[tuple[str, str, Quantity], ...] = ()  # symbol, meaning and value of each
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
            cells = [[value.text if isinstance(value, Quantity) else value for value in row] for row in grid.rows]
            yield table(grid.title, grid.columns, cells, numbers_from=grid.words, optional=grid.optional)
        yield from _lines("remarks", self.remarks)
        if self.drawing:
            yield Line(self.drawing + "\n", fixed=True)
        yield from _lines("source", self.source)


def _lines(heading: str, lines: tuple[str, ...]) -> Iterator[Piece]:
    if lines:
        yield Line(heading, "italic")
        yield Line("\n".join(f"  {line}" for line in lines) + "\n")
