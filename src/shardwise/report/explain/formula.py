"""A formula that is printed and computed from the same text, with the numbers printed beside it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_PYTHON = str.maketrans({"·": "*", "−": "-"})


def chosen(things: float, drawn: float) -> float:
    """Ways to draw some of things; no ways if there are fewer."""
    return math.prod(max(0.0, things - one) / (one + 1) for one in range(int(drawn)))


_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "C": chosen}


@dataclass(frozen=True)
class Formula:
    """``name`` is what it gives; ``text`` has symbols, numbers, + − · / and the functions min, max and C(n, k).

    Further formulas have its value under ``symbol``.
    """

    name: str
    text: str
    symbol: str = ""

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
