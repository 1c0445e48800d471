"""One collective on tensors whose result is known: by the backend, or by a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind, Schedule
from shardwise.engine.collectives import Communicator
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.measure.collectives.request import ELEMENT_BYTES

_WHOLE = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.SEND_RECV)
_PERIOD = 13  # of the values: small whole numbers, whose sums are exact


class Operation:
    """``prepare`` before each run, which is ``run``; ``is_right`` after it."""

    def __init__(self, kind: CollectiveKind, group: dist.ProcessGroup, size_bytes: int, device: torch.device) -> None:
        self.kind, self.group, self.n, self.rank = kind, group, group.size(), group.rank()
        elements = max(1, size_bytes // ELEMENT_BYTES)
        self.block = elements if kind in _WHOLE else max(1, elements // self.n)
        self.size_bytes = ELEMENT_BYTES * (self.block if kind in _WHOLE else self.block * self.n)
        self.device = device
        self.given = self._given()
        self.input = self.given.clone() if self.given is not None else None
        self.output = self._output()

    def _values(self, rank: int, elements: int) -> Tensor:
        places = torch.arange(elements, device=self.device, dtype=torch.int64)
        return ((places + rank) % _PERIOD).float()

    def _given(self) -> Tensor | None:
        match self.kind:
            case CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
                return self._values(self.rank, self.block * self.n)
            case CollectiveKind.SCATTER:
                return self._values(0, self.block * self.n) if self.rank == 0 else None
        return self._values(self.rank, self.block)

    def _output(self) -> Tensor | None:
        elements = self.block
        match self.kind:
            case CollectiveKind.ALL_REDUCE | CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
                return None
            case CollectiveKind.ALL_GATHER | CollectiveKind.ALL_TO_ALL:
                elements *= self.n
            case CollectiveKind.GATHER:
                if self.rank:
                    return None
                elements *= self.n
        return torch.zeros(elements, device=self.device)

    def prepare(self) -> None:
        if self.output is None and self.input is not None and self.given is not None:
            self.input.copy_(self.given)
        elif self.output is not None:
            self.output.fill_(-1)

    def by_schedule(self, communicator: Communicator, schedule: Schedule) -> Callable[[], object]:
        return lambda: communicator.run(schedule, self.input, self.output)

    def by_backend(self) -> Callable[[], object]:
        """gloo's reduce-scatter is an all-reduce, and never used: the engine's own is measured instead."""
        group, root = self.group, dist.get_global_rank(self.group, 0)
        input: Any = self.input  # some are None on some ranks, as the backend wants it
        output: Any = self.output
        match self.kind:
            case CollectiveKind.ALL_REDUCE:
                return lambda: dist.all_reduce(input, group=group)
            case CollectiveKind.BROADCAST:
                return lambda: dist.broadcast(input, root, group=group)
            case CollectiveKind.REDUCE:
                return lambda: dist.reduce(input, root, group=group)
            case CollectiveKind.ALL_GATHER:
                return lambda: all_gather(output, input, group)
            case CollectiveKind.REDUCE_SCATTER:
                return lambda: reduce_scatter_sum(output, input, group)
            case CollectiveKind.ALL_TO_ALL:
                return lambda: dist.all_to_all_single(output, input, group=group)
            case CollectiveKind.GATHER:
                parts = None if output is None else list(output.view(self.n, -1).unbind())
                return lambda: dist.gather(input, parts, root, group=group)
            case CollectiveKind.SCATTER:
                pieces = None if input is None else list(input.view(self.n, -1).unbind())
                return lambda: dist.scatter(output, pieces, root, group=group)
        return self._pass_on

    def _pass_on(self) -> None:
        works: list[Any] = []
        assert self.input is not None and self.output is not None
        if self.rank:
            works.append(dist.irecv(self.output, group=self.group, group_src=self.rank - 1))
        if self.rank + 1 < self.n:
            works.append(dist.isend(self.input, group=self.group, group_dst=self.rank + 1))
        for work in works:
            work.wait()

    def is_right(self) -> bool:
        result = self.input if self.output is None else self.output
        return self.expected is None or (result is not None and torch.equal(result, self.expected))

    @cached_property
    def expected(self) -> Tensor | None:
        """Computed here from what every rank gave; None if a rank gets nothing."""
        own = slice(self.rank * self.block, (self.rank + 1) * self.block)
        everyone, whole = range(self.n), self.block * self.n
        match self.kind:
            case CollectiveKind.ALL_REDUCE:
                return self._sum(self.block)
            case CollectiveKind.REDUCE:
                return self._sum(self.block) if self.rank == 0 else None
            case CollectiveKind.BROADCAST:
                return self._values(0, self.block)
            case CollectiveKind.ALL_GATHER:
                return torch.cat([self._values(rank, self.block) for rank in everyone])
            case CollectiveKind.GATHER:
                return torch.cat([self._values(rank, self.block) for rank in everyone]) if self.rank == 0 else None
            case CollectiveKind.SCATTER:
                return self._values(0, whole)[own]
            case CollectiveKind.REDUCE_SCATTER:
                return self._sum(whole)[own]
            case CollectiveKind.ALL_TO_ALL:
                return torch.cat([self._values(rank, whole)[own] for rank in everyone])
            case CollectiveKind.SEND_RECV:
                return self._values(self.rank - 1, self.block) if self.rank else None

    def _sum(self, elements: int) -> Tensor:
        total = self._values(0, elements)
        for rank in range(1, self.n):
            total += self._values(rank, elements)
        return total
