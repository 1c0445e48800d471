"""How hard properties are searched for a counterexample."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    """All of them in `make test-all`, every eighth one, always the same, in `make test`."""
    return max(1, number // 8) if settings().derandomize else number
