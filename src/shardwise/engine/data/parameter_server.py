"""Parameter servers at work: servers that keep the weights, workers that push gradients and pull weights.

Synchronous: a server waits for the gradients of all workers, adds them in the order of their ranks, and updates once.
Asynchronous: it updates with every gradient as it comes. A worker that is more than ``staleness`` steps ahead of the
slowest waits for its weights: stale synchronous parallel, Ho et al., NIPS 2013. Messages have no header: a worker's
gradients come in order, so that a server counts its steps by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.pieces import ServerPlan

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
