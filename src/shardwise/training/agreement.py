"""What all ranks decide alike: when to stop or to save, and what to do about bad steps and memory pressure."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.optim.one_pass import REFUSED
from shardwise.engine.trainer import Trainer
from shardwise.spec.errors import SpecError
from shardwise.spec.run import NonFinite, Run, Spikes

# -- agreement: a signal came, or it is time for a checkpoint ----------------------------------------

PERIOD_SECONDS = 0.2  # between two agreements: soon enough for a waiting user, rare enough to cost nothing
MOST_STEPS = 256


class StopSignal:
    """``requested`` turns true on SIGTERM or SIGUSR1, Slurm's warning of a time limit, after `listen`."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        # Ctrl-C reaches all processes of a terminal; the launcher decides what happens.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _note(self, *_: Any) -> None:
        self.requested = True


@dataclass(frozen=True)
class RankRequests:
    """What a rank asks for; all ranks get the maximum of each field."""

    stop: int = 0  # a signal asked this process to end
    save: int = 0  # it is time for a checkpoint (rank 0)
    saving: int = 0  # a checkpoint is still being written here
    steps: int = 0  # steps until the next agreement (rank 0)


class Agreement:
    """`at_step`, called before each step, returns what ranks requested at an earlier step (``requested_at``), or None.

    Requests are exchanged in the background, in a group of their own, so that no rank waits for them.
    """

    def __init__(self, first_step: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", group_desc="agreement") if self.world > 1 else None
        self._next, self._begun, self.requested_at = first_step, (first_step, time.monotonic()), first_step
        self._numbers: Tensor | None = None
        self._work: dist.Work | None = None

    def at_step(self, step: int, own: RankRequests) -> RankRequests | None:
        """``own`` is what this rank requests now; all ranks learn it at the next agreement."""
        if step < self._next:
            return None
        agreed, self.requested_at = self.finish(), self._begun[0]
        self._begin(own, step)
        self._next = step + max(1, agreed.steps if agreed else 1)
        return agreed

    def restart_from(self, step: int) -> None:
        """Starts over at an earlier step, after a roll-back of all ranks."""
        self.finish()
        self._next, self._begun = step, (step, time.monotonic())

    def _begin(self, own: RankRequests, step: int) -> None:
        steps = self._steps_of_a_period(step)  # called on all ranks: it also starts the period
        steps = steps if self.rank == 0 else 0
        self._numbers = torch.tensor((*astuple(own)[:-1], steps), dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, self._group, async_op=True)

    def finish(self) -> RankRequests | None:
        """Completes the exchange in flight; called by all ranks after the same step."""
        if self._numbers is None:
            return None
        if self._work is not None:
            self._work.wait()
        stop, save, saving, steps = self._numbers.tolist()
        self._numbers = self._work = None
        return RankRequests(stop, save, saving, steps)

    def _steps_of_a_period(self, step: int) -> int:
        (since, began), now = self._begun, time.monotonic()
        self._begun = (step, now)
        if step == since:
            return 1
        return min(MOST_STEPS, max(1, math.floor(PERIOD_SECONDS * (step - since) / max(1e-9, now - began))))


# -- Bad steps and memory pressure -----------------------------------------------------------------
# Decisions depend only on numbers that are equal on all ranks, so that all ranks decide the same.

LEAST_LOSSES = 8  # needed for a meaningful median
STEP = 1 / 8  # of the share of optimizer states outside of the device
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
