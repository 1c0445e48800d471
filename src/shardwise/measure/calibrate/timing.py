"""Seconds of a call, on a CPU or a GPU, while the other processes of the node do the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROUNDS = 7
ROUND_SECONDS = 0.02  # of one round at least: a clock's grain and one interrupt do not show


class Together:
    """Processes that start their measurements at the same time, so that each is measured under contention.

    They synchronise by counting in a store, not by a collective: what is measured has its own process group.
    """

    def __init__(self, store: Store, world: int) -> None:
        self._store = dist.PrefixStore("together", store)  # type: ignore[attr-defined]
        self._world, self._meetings = world, 0

    def meet(self) -> None:
        self._meetings += 1
        key = f"meeting-{self._meetings}"
        arrived = self._store.add(key, 1)
        while arrived < self._world:
            time.sleep(0.0005)
            arrived = self._store.add(key, 0)


def seconds_of(call: Callable[[], Any], device: torch.device, together: Together) -> float:
    """The mean seconds of one call in an undisturbed round: other load on the machine only ever adds time."""
    call()
    repeats = max(1, round(ROUND_SECONDS / max(1e-7, _round(call, device, 1))))
    found = []
    for _ in range(ROUNDS):
        together.meet()
        found.append(_round(call, device, repeats))
    return undisturbed(found)


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def _round(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
