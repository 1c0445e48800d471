"""How long an answer may take: in time of this process, so that what else a machine does changes no plan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
USUAL_SECONDS = 60.0
THOROUGH_SECONDS = 3600.0


class Deadline:
    """Begins when it is made; ``None`` never ends. ``was_hit``: something was left out for it, or for a part of it."""

    def __init__(self, seconds: float | None, whole: Deadline | None = None) -> None:
        self.seconds, self._whole = seconds, whole
        self._started = time.process_time()
        self.was_hit = False

    @property
    def spent_seconds(self) -> float:
        return time.process_time() - self._started

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.spent_seconds > self.seconds

    def part(self) -> Deadline:
        """Half of what is left, for one part of an answer: so there is time for what comes after it."""
        left = None if self.seconds is None else max(0.0, self.seconds - self.spent_seconds)
        return Deadline(None if left is None else left / 2, self)

    def hit(self) -> None:
        self.was_hit = True
        if self._whole is not None:
            self._whole.hit()

    def leaves_out(self) -> bool:
        """Whether it has passed, so that what is asked now is left out."""
        if self.passed:
            self.hit()
        return self.passed

    def until(self, several: Iterable[T]) -> Iterator[T]:
        """As many of ``several`` as there is time for, the first in any case."""
        for number, one in enumerate(several):
            if number and self.passed:
                self.hit()
                return
            yield one
