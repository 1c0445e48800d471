"""How ranks meet, and how they agree to act at the same step when only some know why."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.mesh import store_at
from shardwise.engine.torch_private import Store
from shardwise.run.environment import Started, interface_towards, loopback_interface
from shardwise.spec.errors import SpecError

# -- the store through which ranks that another launcher started find each other ---------------------

WAIT_SECONDS = 300.0  # for the slowest rank to be started


def store_of(here: Started, seconds: float = WAIT_SECONDS) -> Store:
    """Raises SpecError if the ranks cannot meet in time."""
    assert here.address is not None and here.port is not None, "ranks of our own launcher meet in a file"
    bind_gloo(here.address, several_hosts=here.hosts > 1)
    try:
        return store_at(here.address, here.port, here.rank, here.world, seconds)
    except RuntimeError as error:  # as torch raises
        first = next(iter(str(error).splitlines()), "no answer")
        problem = f"rank {here.rank} of {here.world} at {here.address}:{here.port}: {first}"
        raise SpecError(
            "rendezvous", problem, "set MASTER_ADDR and MASTER_PORT to a free port of rank 0's host"
        ) from None


def bind_gloo(address: str, *, several_hosts: bool) -> None:
    """Makes gloo use the interface that reaches rank 0; by default it uses that of the host's name, often another one.

    Loopback is no choice if other hosts must reach this one.
    """
    name = interface_towards(address)
    if name and not (several_hosts and name == loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


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
