"""Evaluates every formula of an explanation with the numbers printed beside it, found by the form of the page.

A line under "formula" gives a result, a column, or a cell ("row: column"), or defines a function; a cell under the
heading "formula" gives a figure of its row. ", k = 3" behind a formula are numbers of its own. Elsewhere there is no
equation. Written without the code that prints: what it computes must come out of the page alone.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.report.explain.explanation import Explanation, GridTable, Quantity

Values = dict[str, Any]  # a number, the numbers of a column, or a function
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _choices(things: float, drawn: float) -> float:
    return math.prod(max(0.0, things - one) / (one + 1) for one in range(int(drawn)))


def _flat(reduce: Callable[[Any], float]) -> Callable[..., float]:
    return lambda *given: reduce([one for part in given for one in (part if isinstance(part, list) else [part])])


FUNCTIONS: Values = {
    "sum": _flat(sum), "max": _flat(max), "min": _flat(min), "floor": math.floor, "ceil": math.ceil, "log2": math.log2,
    "sqrt": math.sqrt, "C": _choices, "divides": lambda divisor, number: float(number % divisor == 0),
}  # fmt: skip


def evaluated(text: str, values: Values) -> float:
    text, *own = re.split(r", (?=\w+ = )", text)
    known = {**FUNCTIONS, **values, **{name: float(value) for name, value in (one.split(" = ") for one in own)}}

    def value(node: ast.expr, axis: str = "") -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                return known[name.removesuffix("_i") + f"_{axis}" if name.endswith("_i") else name]
            case ast.BinOp():
                return _OPERATORS[type(node.op)](value(node.left, axis), value(node.right, axis))
            case ast.Call(func=ast.Name(id=name)):
                arguments = [_over_axes(one) or value(one, axis) for one in node.args]
                return known[name](*arguments)
        raise AssertionError(ast.dump(node))

    def _over_axes(node: ast.expr) -> list[float]:
        """What an argument is on every axis, where it speaks of axis i."""
        indexed = [one.id[:-2] for one in ast.walk(node) if isinstance(one, ast.Name) and one.id.endswith("_i")]
        axes = [str(index) for index in range(1, 9) if indexed and f"{indexed[0]}_{index}" in known]
        return [value(node, axis) for axis in axes]

    return float(value(ast.parse(text.translate({ord("·"): "*", ord("−"): "-"}), mode="eval").body))


def _bound(symbol: str, value: float) -> Values:
    name = symbol.partition(",")[0]
    if name.startswith("1/"):
        return {name[2:]: 1 / value} if value else {}
    return {name: value} if name.isidentifier() else {}


def _columns(grid: GridTable) -> list[Values]:
    """The numbers of every row by the headings of their columns."""
    return [
        {heading: cell.value for heading, cell in zip(grid.columns, row) if isinstance(cell, Quantity)}
        for row in grid.rows
    ]


def check_formulas(told: Explanation) -> int:
    """How many were evaluated; fails where one does not give the figure beside it."""
    values: Values = {}
    for symbol, _, one in told.numbers:
        bound = _bound(symbol, one.value) if symbol else {}
        assert not bound.keys() & values.keys(), f"{symbol} has two meanings"
        values |= bound
    for grid in told.tables:
        rows = _columns(grid)
        for heading in grid.columns:
            if heading.isidentifier() and heading not in values:
                values[heading] = [row[heading] for row in rows if heading in row]
    results = {what: one.value for what, one in told.result}
    count = sum(_check_line(line, values, results, told) for line in told.formula)
    for words in (told.title, *told.remarks, *(meaning for _, meaning, _ in told.numbers), *results):
        assert " = " not in words, f"an equation that nothing evaluates: {words}"
    return count + sum(_check_cells(grid, values) for grid in told.tables)


def _check_line(line: str, values: Values, results: dict[str, float], told: Explanation) -> int:
    name, _, text = line.partition(" = ")
    assert text, f"no formula: {line}"
    function = re.fullmatch(r"(\w+)\((\w+)\)", name)
    if function:
        values[function[1]] = lambda given: evaluated(text, {**values, function[2]: given})
        return 1
    if name in results:
        found = evaluated(text, values)
        assert found == pytest.approx(results[name], rel=1e-9, abs=1e-30), (told.title, line)
        symbol = name.split()[0]
        if symbol not in values:
            values[symbol] = found
        return 1
    row_name, _, column = name.rpartition(": ")
    checked = 0
    for grid in told.tables:
        for row, figures in zip(grid.rows, _columns(grid)):
            heading = column if row_name and row[0] == row_name else name
            own = {key: one for label, figure in figures.items() for key, one in _bound(label, figure).items()}
            needed = {key for key in map(_symbol, grid.columns) if key and re.search(rf"(?<!\w){key}(?!\w)", text)}
            if heading in figures and needed - values.keys() - own.keys() == set() and _complete(needed, own, values):
                found = evaluated(text, {**values, **own})
                assert found == pytest.approx(figures[heading], rel=1e-9, abs=1e-30), (told.title, line, row)
                checked = 1
    assert checked, f"{line!r} of {told.title!r} gives nothing on the page"
    return checked


def _symbol(heading: str) -> str:
    return re.escape(heading.partition(",")[0].removeprefix("1/"))


def _complete(needed: set[str], own: Values, values: Values) -> bool:
    """Whether a row has a number wherever the formula speaks of its columns; some rows are for comparison only."""
    return all(key in own or not isinstance(values.get(key), list) for key in needed)


def _check_cells(grid: GridTable, values: Values) -> int:
    headings = list(grid.columns)
    if "formula" not in headings:
        return 0
    cells = [(str(row[headings.index("formula")]), row) for row in grid.rows]
    for text, row in cells:
        figures = [cell.value for cell in row if isinstance(cell, Quantity)]
        if text:
            found = evaluated(text, values)
            assert any(found == pytest.approx(one, rel=1e-9, abs=1e-30) for one in figures), (grid.title, text, found)
    return sum(1 for text, _ in cells if text)
