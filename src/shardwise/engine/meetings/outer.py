"""Local SGD and DiLoCo: workers train on their own, and synchronise every so many steps.

Local SGD takes the mean of the weights. DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) takes the mean
change of the workers' weights since the last synchronisation as a gradient, and SGD with Nesterov momentum as an outer
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.labels import Called
from shardwise.engine.names import sent
from shardwise.engine.reductions import all_reduce_sum
from shardwise.spec.less_communication import Synchronise

PIECE_BYTES = 25 * 2**20  # of weights that are summed together


class OuterSteps:
    """Of one worker: ``values`` are the fp32 weights that it trains, in the order of all workers of ``group``.

    `after_step` follows each step of the inner optimizer and says whether the weights have moved to those of all
    workers. ``anchors`` (the weights of the last synchronisation) and ``momenta`` are the same on all workers, and
    empty for local SGD; ``steps`` are those since the last meeting.
    """

    def __init__(self, values: Sequence[Tensor], group: dist.ProcessGroup, synchronise: Synchronise) -> None:
        self.values, self.group, self.synchronise = list(values), group, synchronise
        self.steps = 0
        self.sent_bytes = 0
        self.anchors: list[Tensor] = []
        self.momenta: list[Tensor] = []
        if synchronise.method == "diloco":
            self.anchors = [one.detach().clone() for one in self.values]
            self.momenta = [torch.zeros_like(one) for one in self.anchors]

    @torch.no_grad()
    def begin(self) -> None:
        """After the weights were given other values, the same on all workers."""
        self.steps = 0
        if self.anchors:
            torch._foreach_copy_(self.anchors, [one.detach() for one in self.values])
            torch._foreach_zero_(self.momenta)

    @torch.no_grad()
    def after_step(self) -> bool:
        self.steps += 1
        if self.steps < self.synchronise.inner_steps:
            return False
        self.steps = 0
        for numbers in self._pieces():
            values = [self.values[number].detach() for number in numbers]
            if self.anchors:
                self._outer_step(values, [self.anchors[n] for n in numbers], [self.momenta[n] for n in numbers])
            else:
                torch._foreach_copy_(values, self._mean(values))
        return True

    def _outer_step(self, values: list[Tensor], anchors: list[Tensor], momenta: list[Tensor]) -> None:
        gradients = self._mean(list(torch._foreach_sub(anchors, values)))
        momentum, rate = self.synchronise.outer_momentum, self.synchronise.outer_learning_rate
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(gradients, momenta, alpha=momentum)
        torch._foreach_add_(anchors, gradients, alpha=-rate)
        torch._foreach_copy_(values, anchors)

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of all workers, with the same bits on each."""
        flat = torch.cat([one.reshape(-1) for one in tensors])
        with sent("dp", Called.WORKERS_WEIGHTS, flat):
            all_reduce_sum(flat, self.group)
        ranks = self.group.size()
        self.sent_bytes += 2 * flat.numel() * flat.element_size() * (ranks - 1) // ranks
        flat.div_(ranks)
        pieces = torch.split(flat, [one.numel() for one in tensors])
        return [piece.view_as(one) for piece, one in zip(pieces, tensors)]

    def _pieces(self) -> Iterator[list[int]]:
        """Numbers of tensors that are summed together."""
        piece: list[int] = []
        size = 0
        for number, one in enumerate(self.values):
            piece.append(number)
            size += one.numel() * one.element_size()
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece
