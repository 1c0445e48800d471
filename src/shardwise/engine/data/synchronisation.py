"""Data-parallel workers that do not sum their gradients in every step: local SGD, DiLoCo, late sums.

Local SGD takes the mean of the weights. DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) takes the mean
change of the workers' weights since the last synchronisation as a gradient, and SGD with Nesterov momentum as an outer
optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.reductions import Pending, all_reduce_bytes, all_reduce_sum, split_like
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub, foreach_zero_
from shardwise.spec.less_communication import Synchronise

PIECE_BYTES = 25 * 2**20  # of weights that are summed together


class OuterSteps:
    """One worker's outer optimizer; ``values`` are the fp32 weights it trains, in the same order on all workers.

    Call `after_step` after each step of the inner optimizer; it returns whether the workers have synchronised.
    ``anchors`` (the weights of the last synchronisation) and ``momenta`` are the same on all workers, and empty for
    local SGD; ``steps`` counts those since the last synchronisation.
    """

    def __init__(self, values: Sequence[Tensor], group: dist.ProcessGroup, synchronise: Synchronise) -> None:
        self.values, self.group, self.synchronise = list(values), group, synchronise
        self.steps = 0
        self.sent_bytes = 0
        self.anchors: list[Tensor] = []
        self.momenta: list[Tensor] = []
        if synchronise.method == "diloco":
            self.anchors = [value.detach().clone() for value in self.values]
            self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors]

    @torch.no_grad()
    def begin(self) -> None:
        """Call after weights were loaded, the same on all workers."""
        self.steps = 0
        if self.anchors:
            foreach_copy_(self.anchors, [value.detach() for value in self.values])
            foreach_zero_(self.momenta)

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
                foreach_copy_(values, self._mean(values))
        return True

    def _outer_step(self, values: list[Tensor], anchors: list[Tensor], momenta: list[Tensor]) -> None:
        gradients = self._mean(list(foreach_sub(anchors, values)))
        momentum, rate = self.synchronise.outer_momentum, self.synchronise.outer_learning_rate
        foreach_mul_(momenta, momentum)
        foreach_add_(momenta, gradients)
        foreach_add_(gradients, momenta, alpha=momentum)
        foreach_add_(anchors, gradients, alpha=-rate)
        foreach_copy_(values, anchors)

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mean over all workers, with the same bits on each."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with sent("dp", Called.WORKERS_WEIGHTS, flat):
            all_reduce_sum(flat, self.group)
        ranks = self.group.size()
        self.sent_bytes += all_reduce_bytes(flat, ranks)
        return split_like(flat.div_(ranks), tensors)

    def _pieces(self) -> Iterator[list[int]]:
        """Groups of tensors, by number, that are summed together."""
        piece: list[int] = []
        size = 0
        for number, value in enumerate(self.values):
            piece.append(number)
            size += value.numel() * value.element_size()
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece


@dataclass
class _InFlight:
    flat: Tensor
    work: Pending | None

    def settle(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.flat


class LateSums:
    """Asynchronous SGD with bounded staleness: the sum of a step's gradients moves the weights some steps later.

    A worker starts to send its gradients of ``parameters`` and goes on; it waits only for sums over ``group`` that are
    ``staleness`` steps old, so workers may be that many steps apart. All of them apply the same sums in the same order,
    so their weights stay equal to the last bit.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, staleness: int) -> None:
        self.parameters, self.group, self.staleness = list(parameters), group, staleness
        self.in_flight: deque[_InFlight] = deque()
        self.sent_bytes = 0

    @torch.no_grad()
    def exchange(self) -> bool:
        """Sends the gradients and replaces them by the sums of ``staleness`` steps ago. False: there are none yet."""
        flat = torch.cat(
            [
                parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
                for parameter in self.parameters
            ]
        )
        with sent("dp", Called.LATE_GRADIENTS, flat):
            work = all_reduce_sum(flat, self.group, async_op=True, in_fp32=True)
        self.sent_bytes += all_reduce_bytes(flat, self.group.size())
        self.in_flight.append(_InFlight(flat, work))
        if len(self.in_flight) <= self.staleness:
            return False
        for parameter, gradient in zip(self.parameters, split_like(self.in_flight.popleft().settle(), self.parameters)):
            parameter.grad = gradient
        return True

    def read(self, age: int, number: int) -> Tensor:
        """The ``age``-th oldest sum in flight of one parameter; zeros if there are fewer."""
        parameter = self.parameters[number]
        if age >= len(self.in_flight):
            return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        return split_like(self.in_flight[age].settle(), self.parameters)[number]

    def expect(self, sums: int) -> None:
        """Allocates this many sums, to be written next."""
        first = self.parameters[0]
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.in_flight = deque(
            _InFlight(torch.zeros(elements, dtype=first.grad_dtype or first.dtype, device=first.device), None)
            for _ in range(sums)
        )
