"""Steps that went wrong: gradients that are not finite, losses that jump; and what the run's policy says then.

Everything is decided from numbers that are equal on all ranks, so that all of them decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from enum import Enum

from shardwise.engine.gradient_norm import REFUSED
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Run
from shardwise.spec.run_health import NonFinite, Spikes

LEAST_LOSSES = 8  # before a median says anything


class Verdict(Enum):
    GOOD = "good"
    LEFT_OUT = "left out"  # no weight has moved
    ROLL_BACK = "roll back"


class Health:
    """Judges every step in turn; ``losses`` are those of the last good ones, before a run went on."""

    def __init__(self, run: Run, *, scaled: bool, losses: Iterable[float] = ()) -> None:
        self.run, self.scaled = run, scaled
        self.losses: deque[float] = deque(losses, maxlen=run.spikes.window)
        self.in_a_row = 0  # bad steps, or roll-backs, since the last good step
        self._rolled_back_from = -1

    @property
    def loss_limit(self) -> float | None:
        """Above this a step is left out; None: nothing is a spike (yet)."""
        factor = self.run.spikes.factor
        if factor is None or len(self.losses) < LEAST_LOSSES:
            return None
        return factor * statistics.median(self.losses)

    def judge(self, step: int, loss: float, gradient_norm: float) -> Verdict:
        """What to do about the step number ``step``; raises SpecError if the run has to stop."""
        if math.isfinite(gradient_norm):
            if step > self._rolled_back_from:
                self.in_a_row = 0
            self.losses.append(loss)
            return Verdict.GOOD
        spike = gradient_norm == REFUSED
        rule: NonFinite | Spikes = self.run.spikes if spike else self.run.non_finite
        name = "run.spikes" if spike else "run.non_finite"
        what = f"its loss {loss:.4g} jumped" if spike else "its gradients are not finite"
        self.in_a_row += 1
        if self.in_a_row > rule.in_a_row:
            problem = f"step {step}: {what}, as in the {rule.in_a_row} bad steps before it"
            raise SpecError(name, problem, "lower the learning rate, warm up longer, or look at the data")
        if self.scaled and not spike:
            return Verdict.LEFT_OUT
        if rule.policy == "stop":
            raise SpecError(f"{name}.policy", f"stop: step {step}: {what}", "look at the data, or policy: skip")
        if rule.policy == "skip":
            return Verdict.LEFT_OUT
        self._rolled_back_from = step
        return Verdict.ROLL_BACK

    def went_back(self, losses: Iterable[float]) -> None:
        """The losses are those of a checkpoint again; how many bad steps came one after the other is not forgotten."""
        self.losses = deque(losses, maxlen=self.run.spikes.window)
