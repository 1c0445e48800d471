"""What a checkpoint keeps beside its tensors: numbers, each with a name that a run writes and of the type it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

TO_RESUME = ("optimizer_steps", "data", "losses")  # without which no run goes on


def checked_numbers(found: Any) -> dict[str, Any]:
    """The same numbers; raises ValueError for what no run writes."""
    for name, value in _mapping(found).items():
        if name not in _CHECKS:
            raise ValueError(f"unknown number {name}")
        _CHECKS[name](value)
    return dict(found)


def count(value: Any, least: int = 0) -> int:
    """Raises ValueError for what is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError("no count")
    return value


def _amount(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("no number")


def _steps(value: Any) -> None:
    """Those of an optimizer are counted in floating point."""
    _amount(value)
    if not 0 <= value < math.inf:
        raise ValueError("no number of steps")


def _scale(value: Any) -> None:
    for one in _mapping(value).values():
        _amount(one)


def _losses(value: Any) -> None:
    for one in _sequence(value):
        _amount(one)


def _position(value: Any) -> None:
    """As `Position.to_numbers` writes it."""
    if _mapping(value).keys() != {"batch", "left_out", "sequences"}:
        raise ValueError("no position in the data")
    count(value["batch"])
    count(value["sequences"], 1)
    for one in _sequence(value["left_out"]):
        count(one)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no mapping")
    return value


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return value


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "optimizer_steps": _steps,
    "loss_scale": _scale,
    "inner_steps": count,
    "late_sums": count,
    "data": _position,
    "losses": _losses,
}
