"""Results of a step, read when the next one is already under way: no step waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.trainer import StepResult
from shardwise.training.moment import Moment
from shardwise.training.position import Position


@dataclass(frozen=True)
class Begun:
    """What is known of a step when it is begun."""

    position: Position  # before it
    learning_rate: float
    waited_seconds: float  # for its data
    memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """What a step is judged by."""

    begun: Begun
    loss: float
    gradient_norm: float
    finished: Moment

    @property
    def number(self) -> int:
        """Steps are counted from 1."""
        return self.begun.position.step + 1


class LateResult:
    """The loss and the norm on their way to the host; `read` waits for this step, not for what was begun after it."""

    def __init__(self, begun: Begun, result: StepResult) -> None:
        self.begun = begun
        numbers = torch.stack([result.loss, result.gradient_norm])
        self._numbers: Tensor = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(2, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._finished = Moment(numbers.device)

    def read(self) -> Figures:
        self._finished.wait()
        loss, norm = self._numbers.tolist()
        return Figures(self.begun, loss, norm, self._finished)
