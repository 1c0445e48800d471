"""Asynchronous SGD with bounded staleness: the sum of a step's gradients moves the weights some steps later.

A worker starts to send its gradients and continues; it waits only for sums that are ``staleness`` steps old, so workers
may be that many steps apart. All of them apply the same sums in the same order: weights stay equal to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.labels import Called
from shardwise.engine.names import sent
from shardwise.engine.reductions import Pending, all_reduce_sum


@dataclass
class _UnderWay:
    flat: Tensor
    work: Pending | None

    def settle(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.flat


class LateSums:
    """Of one worker: its own gradients of ``parameters`` go in, sums over ``group`` of earlier steps come out."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, staleness: int) -> None:
        self.parameters, self.group, self.staleness = list(parameters), group, staleness
        self.under_way: deque[_UnderWay] = deque()
        self.sent_bytes = 0

    @torch.no_grad()
    def exchange(self) -> bool:
        """Sends the gradients; those of ``staleness`` steps ago are in their place then. False: there are none yet."""
        flat = torch.cat(
            [one.new_zeros(one.numel()) if one.grad is None else one.grad.reshape(-1) for one in self.parameters]
        )
        with sent("dp", Called.LATE_GRADIENTS, flat):
            work = all_reduce_sum(flat, self.group, async_op=True, in_fp32=True)
        ranks = self.group.size()
        self.sent_bytes += 2 * flat.numel() * flat.element_size() * (ranks - 1) // ranks
        self.under_way.append(_UnderWay(flat, work))
        if len(self.under_way) <= self.staleness:
            return False
        for one, gradient in zip(self.parameters, self._cut(self.under_way.popleft().settle())):
            one.grad = gradient
        return True

    def read(self, age: int, number: int) -> Tensor:
        """The ``age``-th of the sums under way, the oldest first, of one parameter; zeros where there are fewer."""
        parameter = self.parameters[number]
        if age >= len(self.under_way):
            return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        return self._cut(self.under_way[age].settle())[number]

    def expect(self, sums: int) -> None:
        """Makes room for so many sums, which are written next."""
        first = self.parameters[0]
        elements = sum(one.numel() for one in self.parameters)
        self.under_way = deque(
            _UnderWay(torch.zeros(elements, dtype=first.grad_dtype or first.dtype, device=first.device), None)
            for _ in range(sums)
        )

    def _cut(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [one.numel() for one in self.parameters])
        return [piece.view_as(one) for piece, one in zip(pieces, self.parameters)]
