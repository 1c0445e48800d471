"""Runs requests on the ranks of a pool, or on those of a world that others have started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind, Schedule, build_schedule
from shardwise.cost.traffic.gradient_reduction import by_schedules, choose
from shardwise.engine.collectives import Communicator
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.world import joined
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.measure.collectives.request import (
    AUTO,
    BACKEND,
    ELEMENT_BYTES,
    CollectiveRequest,
    MeasuredCollective,
    predicted,
)

# -- One collective on tensors whose result is known: by the backend, or by a schedule ---------------

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


# -- requests on many ranks --------------------------------------------------------------------------

PRELOAD = ("torch", "shardwise.measure.collectives.run")


def measure_in(pool: Pool, request: CollectiveRequest, timeout_seconds: float = 600) -> list[MeasuredCollective]:
    """On the processes of a pool."""
    found: list[MeasuredCollective] = pool.run(
        _work, request.cluster.devices, request, timeout_seconds=timeout_seconds
    )[0]
    return found


def measure_as_rank(
    requests: Sequence[CollectiveRequest], rank: int, world: int, device: str
) -> list[MeasuredCollective]:
    """In a world that torchrun has started: every rank calls this, and meets the others where its environment says."""
    with joined(rank, world, None, device=device):
        return [one for request in requests for one in measure(request, torch.device(device))]


def _work(place: WorkerPlace, request: CollectiveRequest) -> list[MeasuredCollective]:
    torch.set_num_threads(1)
    with joined(place.rank, place.world, place.meeting_file):
        return measure(request, torch.device("cpu"))


def measure(request: CollectiveRequest, device: torch.device) -> list[MeasuredCollective]:
    """To be called by every rank of the world; all return the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in request.level.groups(world)]
    group = next(group for ranks, group in groups if rank in ranks)
    communicator = Communicator(group)
    found: list[MeasuredCollective] = []
    too_long: set[str] = set()
    for size in request.sizes:
        for algorithm in request.algorithms:
            if algorithm in too_long:
                continue
            operation = Operation(request.kind, group, size, device)
            schedule = _schedule(request, algorithm, operation.size_bytes)
            if schedule is None:
                run = operation.by_backend()
            else:
                run = operation.by_schedule(communicator, schedule)
            one = _timed(request, algorithm, operation, run)
            found.append(one)
            if one.median_seconds > request.most_seconds:
                too_long.add(algorithm)
    return found


def _schedule(request: CollectiveRequest, algorithm: str, size: int) -> Schedule | None:
    if algorithm == BACKEND:
        return None
    if algorithm == AUTO:
        return choose(request.kind, size, request.cluster, request.level.runs, AUTO).schedule
    return build_schedule(request.kind, by_schedules(request.cluster, request.level.runs), algorithm, size)


def _timed(
    request: CollectiveRequest, algorithm: str, operation: Operation, run: Callable[[], object]
) -> MeasuredCollective:
    """Every run by itself, begun together; the time of the slowest rank counts."""
    seconds: list[float] = []
    right = True
    repeats, count = request.repeats, 0
    while count < request.warm_up + repeats:
        operation.prepare()
        dist.barrier()
        begin = time.perf_counter()
        run()
        if operation.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        right = right and operation.is_right()
        count += 1
        if count == request.warm_up:
            repeats = _that_fit(request, _slowest(seconds)[-1])
    slowest = _slowest(seconds)[request.warm_up :]
    wrong = torch.tensor(0.0 if right else 1.0)
    dist.all_reduce(wrong)
    return MeasuredCollective(
        request.level.name,
        request.kind.value,
        algorithm,
        operation.n,
        operation.size_bytes,
        len(slowest),
        statistics.median(slowest),
        min(slowest),
        not float(wrong),
        predicted(request, algorithm, operation.size_bytes),
    )


def _that_fit(request: CollectiveRequest, seconds: float) -> int:
    return max(1, min(request.repeats, int(request.most_seconds / max(seconds, 1e-9))))


def _slowest(seconds: list[float]) -> list[float]:
    """Of each run over all ranks, on a CPU backend that is always there."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(one) for one in times]
