"""Loads of experts over all ranks: what the host reads of the routing, and what balances them.

An all-to-all takes its splits from the host, which has to wait for the row counts: the only host synchronisation of a
dispatch. (PyTorch's symmetric memory has exchanges that read their splits on the device, but only for GPUs of one
NVLink domain and with worst-case buffers.) The counts are copied while the device sorts and copies the rows; the host
reads nothing else, forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.profiler_ranges import sent
from shardwise.models.moe import MoELayer
from shardwise.spec.strategy import Strategy


class HostCopy:
    """A copy of some numbers to the host, started when this is made."""

    def __init__(self, numbers: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> list[int]:
        """Waits for the numbers."""
        if self._ready is not None:
            self._ready.synchronize()
        return [int(number) for number in self._numbers.tolist()]


@dataclass(frozen=True)
class Assumed:
    """The load that a dry run assumes, since it routes nothing."""

    skew: float = 1.0
    """How many times as busy as the mean this rank's experts are."""
    nodes: int | None = None
    """The most nodes that a token goes to; None: as many as random choices reach."""


def in_pieces(numbers: list[int], *lengths: int) -> list[tuple[int, ...]]:
    """The numbers cut into pieces of the given lengths."""
    left = iter(numbers)
    return [tuple(islice(left, length)) for length in lengths]


def evenly(total: float, places: int) -> tuple[int, ...]:
    """About ``total`` / ``places`` for each place, integers whose sum is ``total`` rounded."""
    whole = round(total)
    return tuple(whole * (place + 1) // places - whole * place // places for place in range(places))


def sequence_sum(mesh: Mesh, strategy: Strategy) -> Callable[[Tensor], Tensor]:
    """A function that turns the counts [batch, experts] of a rank's tokens into those of whole sequences."""
    name = "sequence" if strategy.sequence_parallel else "cp"  # else tensor-parallel ranks hold the same tokens
    if mesh.size(name) == 1:
        return lambda counts: counts
    group = mesh.group(name)

    def summed(counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        with sent("ep", Called.SEQUENCE_LOADS, total):
            dist.all_reduce(total, group=group)
        return total

    return summed


@torch.no_grad()
def update_balance(module: nn.Module, mesh: Mesh, rate: float) -> None:
    """Ends a step: sums the loads of all its tokens, moves every balancing bias by ``rate``, and clears the loads.

    The result is the same on every rank, since counts are added exactly. The host reads nothing.
    """
    mixtures = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
    if not mixtures:
        return
    totals = torch.stack([mixture.load for mixture in mixtures]).round().long()
    if mesh.size("stage") > 1:
        with sent("ep", Called.STEP_LOADS, totals):
            dist.all_reduce(totals, group=mesh.group("stage"))
    if not mesh.strategy.sequence_parallel:
        totals //= mesh.size("tp")  # all of these ranks have counted the same tokens
    for mixture, total in zip(mixtures, totals):
        mixture.update_bias(total.float(), rate)
