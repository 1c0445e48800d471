"""Results of a step, read while the next one is already running: no step waits for the host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.trainer import StepResult
from shardwise.training.start import Position


class Timestamp:
    """When the work launched so far is done; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """After `wait`."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True)
class StepStart:
    """What is known when a step begins."""

    position: Position  # before it
    learning_rate: float
    waited_seconds: float  # for its data
    memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepFigures:
    """What a step is judged by."""

    begun: StepStart
    loss: float
    gradient_norm: float
    finished: Timestamp

    @property
    def number(self) -> int:
        """Steps are counted from 1."""
        return self.begun.position.step + 1


class PendingResult:
    """Loss and norm being copied to the host; `read` waits for this step, not for later ones."""

    def __init__(self, begun: StepStart, result: StepResult) -> None:
        self.begun = begun
        numbers = torch.stack([result.loss, result.gradient_norm])
        self._numbers: Tensor = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(2, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._finished = Timestamp(numbers.device)

    def read(self) -> StepFigures:
        self._finished.wait()
        loss, norm = self._numbers.tolist()
        return StepFigures(self.begun, loss, norm, self._finished)
