"""Numbers that the host needs of the routing, read once per dispatch.

An all-to-all takes its splits from the host, so how many rows go where has to be waited for: the one host
synchronisation of a dispatch. (PyTorch's symmetric memory has exchanges that read their splits on the device, for GPUs
of one NVLink domain and buffers of the worst case; none is exact in memory and bytes.) The numbers are on their way
while the device sorts and copies the rows; nothing else is read back, forward or backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class HostCopy:
    """A copy of some numbers on the host, under way from the moment it is made."""

    def __init__(self, numbers: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> list[int]:
        """The numbers, waited for."""
        if self._ready is not None:
            self._ready.synchronize()
        return [int(number) for number in self._numbers.tolist()]


@dataclass(frozen=True)
class Assumed:
    """A load that a dry run supposes instead of reading it: even, this rank's experts ``skew`` times as busy.

    No token goes to more than ``nodes`` nodes (None: to as many as chance makes it).
    """

    skew: float = 1.0
    nodes: int | None = None


def in_pieces(numbers: list[int], *lengths: int) -> list[tuple[int, ...]]:
    """The numbers cut into pieces of the given lengths."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(tuple(numbers[start : start + length]))
        start += length
    return pieces


def evenly(total: float, places: int) -> list[int]:
    """About ``total`` / ``places`` for each place, whole numbers whose sum is ``total`` rounded."""
    whole = round(total)
    return [whole * (place + 1) // places - whole * place // places for place in range(places)]
