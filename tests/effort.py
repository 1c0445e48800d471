"""How hard properties are searched for a counterexample."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    """All of them in `make test-all`, every second one in `make test`."""
    return number // 2 if settings().derandomize else number
