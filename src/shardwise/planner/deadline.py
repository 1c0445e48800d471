"""How long a search may take: in time of this process, so that what else a machine does changes no plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
USUAL_SECONDS = 60.0
THOROUGH_SECONDS = 3600.0


class Deadline:
    """Begins when it is made; ``None`` never ends."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._started = time.process_time()
        self.was_hit = False

    @property
    def spent_seconds(self) -> float:
        return time.process_time() - self._started

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.spent_seconds > self.seconds

    def until(self, several: Iterable[T]) -> Iterator[T]:
        """As many of ``several`` as there is time for, the first in any case."""
        for number, one in enumerate(several):
            if number and self.passed:
                self.was_hit = True
                return
            yield one
