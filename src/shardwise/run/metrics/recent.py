"""The newest figures of a run, from the lines that rank 0 writes: for the progress bar, `status` and Prometheus."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

RECENT = 20  # steps whose median is the pace


class RecentSteps:
    """Figures from records of metrics.jsonl, given to `add` in turn; None until a record has one."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None
        self.predicted_seconds: float | None = None
        self.predicted_memory_bytes: float | None = None
        self.memory_bytes: float | None = None
        self.memory_bytes_of_ranks: tuple[float, ...] = ()
        self.interval = 1  # steps between two records
        self.useful_seconds = 0.0  # of steps that were not bad
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last_seconds: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        self.step = record["step"]
        if record.get("validation_loss") is not None:
            self.validation_loss = record["validation_loss"]
        seconds = record.get("seconds")
        if seconds is None:
            return
        self.loss = record.get("loss")
        for name in ("tokens_per_second", "mfu", "predicted_seconds", "predicted_memory_bytes", "memory_bytes"):
            if record.get(name) is not None:
                setattr(self, name, record[name])
        of_ranks = record.get("memory_bytes_of_ranks")
        if of_ranks is None:  # otherwise counting slowed the step down
            self._recent.append(seconds)
        elif isinstance(of_ranks, list):
            self.memory_bytes_of_ranks = tuple(of_ranks)
        self._last_seconds = seconds
        self.interval = int(record.get("interval") or 1)
        if not record.get("bad"):
            self.useful_seconds += seconds * self.interval

    @property
    def step_seconds(self) -> float | None:
        """Median of the newest steps."""
        return statistics.median(self._recent) if self._recent else self._last_seconds

    def left_seconds(self, steps: int) -> float | None:
        """Time until ``steps`` are done, at the pace of the newest."""
        seconds = self.step_seconds
        return None if seconds is None else max(0, steps - self.step) * seconds
