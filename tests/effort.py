"""How hard properties are searched for a counterexample, and how much work something is on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from hypothesis import settings


def examples(number: int) -> int:
    """All of them in `make test-all`, every eighth one, always the same, in `make test`."""
    return max(1, number // 8) if settings().derandomize else number


def calls_of(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, which no other work on the machine changes."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _function: events.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]
