"""Data-parallel workers without a sum of gradients in every step: local SGD, DiLoCo, late sums, parameter servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.reductions import Pending, all_reduce_bytes, all_reduce_sum, split_like
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import foreach_add_, foreach_copy_, foreach_mul_, foreach_sub, foreach_zero_
from shardwise.layout.pieces import ServerPlan
from shardwise.spec.less_communication import Synchronise

# -- Local SGD and DiLoCo --------------------------------------------------------------------------
# Local SGD takes the mean of the weights. DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) takes the mean
# change of the workers' weights since the last synchronisation as a gradient, and SGD with Nesterov momentum as an
# outer optimizer.

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


# -- Parameter servers: servers that keep the weights, workers that push gradients and pull weights ----
# Synchronous: a server waits for the gradients of all workers, adds them in the order of their ranks, and updates once.
# Asynchronous: it updates with every gradient as it comes. A worker that is more than ``staleness`` steps ahead of the
# slowest waits for its weights: stale synchronous parallel, Ho et al., NIPS 2013. Messages have no header: a worker's
# gradients come in order, so that a server counts its steps by them.

MakeOptimizer = Callable[[Tensor, float], torch.optim.Optimizer]  # of weights, with the learning rate times this


@dataclass
class ServerRecord:
    """What a server has counted: payload bytes, and for each update how stale its gradient was."""

    received_bytes: int = 0
    sent_bytes: int = 0
    gaps: list[int] = field(default_factory=list)
    """For each update, how many steps its worker was ahead of the slowest one when it was sent new weights."""
    missed: list[int] = field(default_factory=list)
    """For each update, how many others came since the weights that its gradient was computed with."""


class ParameterServer:
    """One server: rank ``plan.workers + number`` of the world, whose first ranks are the workers."""

    def __init__(self, plan: ServerPlan, number: int, weights: Tensor, make_optimizer: MakeOptimizer) -> None:
        part = plan.part(number)
        self.plan, self.record = plan, ServerRecord()
        self.weights = weights[part.start : part.stop].clone().requires_grad_()
        self._make_optimizer = make_optimizer

    def serve_together(self, steps: int) -> None:
        """One update in each of ``steps``, by the gradients of all workers."""
        optimizer = self._make_optimizer(self.weights, 1.0)
        gradients = [torch.empty_like(self.weights, requires_grad=False) for _ in range(self.plan.workers)]
        for worker in range(self.plan.workers):
            self._send(worker)
        for _ in range(steps):
            for _ in range(self.plan.workers):
                arrived = torch.empty_like(gradients[0])
                gradients[self._receive(arrived)] = arrived
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            self._update(optimizer, total)
            for worker in range(self.plan.workers):
                self.record.gaps.append(0)
                self.record.missed.append(0)
                self._send(worker)

    def serve_apart(self, steps: int, staleness: int) -> None:
        """An update with every gradient; each moves the weights by its share of a step that all take together."""
        workers = self.plan.workers
        optimizer = self._make_optimizer(self.weights, 1 / workers)
        clocks, seen = [0] * workers, [0] * workers
        waiting: set[int] = set()
        for worker in range(workers):
            self._send(worker)
        for updates in range(steps * workers):
            gradient = torch.empty_like(self.weights, requires_grad=False)
            worker = self._receive(gradient)
            self.record.missed.append(updates - seen[worker])
            self._update(optimizer, gradient * workers)
            clocks[worker] += 1
            waiting.add(worker)
            for ready in sorted(other for other in waiting if clocks[other] - min(clocks) <= staleness):
                waiting.remove(ready)
                seen[ready] = updates + 1
                self.record.gaps.append(clocks[ready] - min(clocks))
                self._send(ready)

    def _update(self, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
        self.weights.grad = gradient
        optimizer.step()

    def _receive(self, into: Tensor) -> int:
        """Receives from whichever worker comes first, and returns its rank."""
        worker = int(dist.recv(into))
        self.record.received_bytes += into.nbytes
        return worker

    def _send(self, worker: int) -> None:
        dist.send(self.weights.detach(), worker)
        self.record.sent_bytes += self.weights.nbytes


class ServerClient:
    """A worker's side: ``weights`` are all of them, as it last got them."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.weights = torch.empty(plan.elements)

    def pull(self) -> Tensor:
        """Waits for the weights of all servers."""
        waits = [dist.irecv(self._of(self.weights, server), self._rank(server)) for server in range(self.plan.servers)]
        for wait in waits:
            assert wait is not None
            wait.wait()
        return self.weights

    def push(self, gradient: Tensor) -> None:
        """Returns once the gradient is sent, or its memory is no longer needed for sending."""
        waits = [dist.isend(self._of(gradient, server), self._rank(server)) for server in range(self.plan.servers)]
        for wait in waits:
            assert wait is not None
            wait.wait()

    def _of(self, tensor: Tensor, server: int) -> Tensor:
        part = self.plan.part(server)
        return tensor[part.start : part.stop]

    def _rank(self, server: int) -> int:
        return self.plan.workers + server
