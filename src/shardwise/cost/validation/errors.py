"""Mean and worst absolute error of scored rows, by group and of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorSummary:
    """Of absolute errors, as shares."""

    rows: int
    mean: float
    worst: float


def summarize_errors(errors: Iterable[tuple[str, float]]) -> dict[str, ErrorSummary]:
    """Of pairs of a group and an error: every group in its order, then ``all``."""
    groups: dict[str, list[float]] = {}
    every = []
    for name, error in errors:
        groups.setdefault(name, []).append(abs(error))
        every.append(abs(error))
    groups["all"] = every
    return {name: ErrorSummary(len(own), sum(own) / len(own), max(own)) for name, own in groups.items()}
