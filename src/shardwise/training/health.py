"""Bad steps and memory pressure, and what the run's policy does about them.

Decisions depend only on numbers that are equal on all ranks, so that all ranks decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch

from shardwise.engine.optim.one_pass import REFUSED
from shardwise.engine.trainer import Trainer
from shardwise.spec.errors import SpecError
from shardwise.spec.run import NonFinite, Run, Spikes

LEAST_LOSSES = 8  # needed for a meaningful median
STEP = 1 / 8
SHORT, AMPLE = 0.95, 0.85  # shares of a device's memory for tensors


class StepVerdict(Enum):
    GOOD = "good"
    LEFT_OUT = "left out"  # no weight has moved
    ROLL_BACK = "roll back"


class Health:
    """Judges every step in turn; ``losses`` are those of the last good steps before the run resumed."""

    def __init__(self, run: Run, *, scaled: bool, losses: Iterable[float] = ()) -> None:
        self.run, self.scaled = run, scaled
        self.losses: deque[float] = deque(losses, maxlen=run.spikes.window)
        self.in_a_row = 0  # bad steps, or roll-backs, since the last good step
        self._rolled_back_at = -1

    @property
    def loss_limit(self) -> float | None:
        """Steps with a higher loss are skipped; None while nothing counts as a spike."""
        factor = self.run.spikes.factor
        if factor is None or len(self.losses) < LEAST_LOSSES:
            return None
        return factor * statistics.median(self.losses)

    def judge(self, step: int, loss: float, gradient_norm: float) -> StepVerdict:
        """What to do about a step; raises SpecError if the run has to stop."""
        if math.isfinite(gradient_norm):
            if step > self._rolled_back_at:
                self.in_a_row = 0
            self.losses.append(loss)
            return StepVerdict.GOOD
        spike = gradient_norm == REFUSED
        rule: NonFinite | Spikes = self.run.spikes if spike else self.run.non_finite
        name = "run.spikes" if spike else "run.non_finite"
        what = f"its loss {loss:.4g} jumped" if spike else "its gradients are not finite"
        self.in_a_row += 1
        if self.in_a_row > rule.in_a_row:
            problem = f"step {step}: {what}, as in the {rule.in_a_row} bad steps before it"
            raise SpecError(name, problem, "lower the learning rate, warm up longer, or look at the data")
        if self.scaled and not spike:
            return StepVerdict.LEFT_OUT
        if rule.policy == "stop":
            raise SpecError(f"{name}.policy", f"stop: step {step}: {what}", "look at the data, or policy: skip")
        if rule.policy == "skip":
            return StepVerdict.LEFT_OUT
        self._rolled_back_at = step
        return StepVerdict.ROLL_BACK

    def rolled_back(self, losses: Iterable[float]) -> None:
        """Restores the losses of a checkpoint; the count of consecutive bad steps is kept."""
        self.losses = deque(losses, maxlen=self.run.spikes.window)


class MemoryPressure:
    """Offloads more optimizer states when measured memory is short, and brings them back later.

    Every rank has one; all get the same peak and so decide the same. The share moves by eighths, and back only if the
    next counted step would stay well below the limit, so that it does not oscillate.
    """

    def __init__(self, trainer: Trainer[Any]) -> None:
        device, offload = trainer.job.cluster.device, trainer.job.strategy.offload
        self.trainer, self.share = trainer, offload.optimizer
        self.least = max(offload.weights, offload.gradients)
        self.limit_bytes = device.usable_memory - device.framework_memory

    def after(self, peak_bytes: int) -> float | None:
        """The new share, if ``peak_bytes``, those of the fullest rank in the last step, change it."""
        share = self._wanted(peak_bytes)
        if share == self.share:
            return None
        self.share = share
        self.trainer.offload_optimizer(share)
        if self.trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.trainer.device)
        return share

    def _wanted(self, peak_bytes: int) -> float:
        if peak_bytes > SHORT * self.limit_bytes:
            return min(1.0, self.share + STEP)
        if peak_bytes + STEP * self.trainer.optimizer.state_bytes < AMPLE * self.limit_bytes:
            return max(self.least, self.share - STEP)
        return self.share
