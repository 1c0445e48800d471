"""What all ranks agree to do at the same step though only one of them knows why: a signal came, time has passed."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PERIOD_SECONDS = 0.2  # between two agreements: responsive enough for a waiting user, rare enough to cost nothing
MOST_STEPS = 256


class StopSignal:
    """``requested`` becomes true with SIGTERM or SIGUSR1 (as Slurm warns of a limit), once `listen` was called."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        # Ctrl-C goes to all processes of a terminal; the launcher decides what follows.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _note(self, *_: Any) -> None:
        self.requested = True


@dataclass(frozen=True)
class RankRequests:
    """What a rank asks for; all ranks get the largest of each."""

    stop: int = 0  # a signal asked this process to end
    save: int = 0  # rank 0: it is time for a checkpoint
    saving: int = 0  # a checkpoint is still being written here
    steps: int = 0  # rank 0: after how many steps to agree again


class Agreement:
    """`at_step`, called before each step, returns all ranks' requests of an earlier step, ``requested_at``, or None.

    They are exchanged in the background, in a separate group, so that no rank waits for them.
    """

    def __init__(self, first_step: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", group_desc="agreement") if self.world > 1 else None
        self._next, self._begun, self.requested_at = first_step, (first_step, time.monotonic()), first_step
        self._numbers: Tensor | None = None
        self._work: dist.Work | None = None

    def at_step(self, step: int, own: RankRequests) -> RankRequests | None:
        """``own`` is what this rank requests now; all ranks learn of it at the next agreement."""
        if step < self._next:
            return None
        agreed, self.requested_at = self.finish(), self._begun[0]
        self._begin(own, step)
        self._next = step + max(1, agreed.steps if agreed else 1)
        return agreed

    def restart_from(self, step: int) -> None:
        """Restarts after a roll-back to an earlier step, which all ranks do at once."""
        self.finish()
        self._next, self._begun = step, (step, time.monotonic())

    def _begin(self, own: RankRequests, step: int) -> None:
        steps = self._steps_of_a_period(step)  # on all ranks: it also sets the period's begin
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
