"""Runs requests on the ranks of a pool, or on ranks that a launcher has started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives import CollectiveKind, Schedule, build_schedule
from shardwise.engine.collectives import Communicator
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.mesh import process_group
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.gradient_schedules import by_schedules, choose
from shardwise.measure.calibrate.ranks import Rank
from shardwise.measure.collectives.request import (
    AUTO,
    BACKEND,
    ELEMENT_BYTES,
    CollectiveRequest,
    MeasuredCollective,
    predicted,
)

# -- one collective on tensors whose result is known -------------------------------------------------

_UNDIVIDED = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.SEND_RECV)
_IN_PLACE = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
# A block for or from every rank, instead of one block.
_SENDS_ALL = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.SCATTER)
_RECEIVES_ALL = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL, CollectiveKind.GATHER)
_PERIOD = 13  # of the values: small integers, whose sums are exact


class Operation:
    """A collective whose result is known: call ``prepare`` before each run and ``is_right`` after it."""

    def __init__(self, kind: CollectiveKind, group: dist.ProcessGroup, size_bytes: int, device: torch.device) -> None:
        self.kind, self.group, self.n, self.rank = kind, group, group.size(), group.rank()
        elements = max(1, size_bytes // ELEMENT_BYTES)
        self.block = elements if kind in _UNDIVIDED else max(1, elements // self.n)
        self.size_bytes = ELEMENT_BYTES * (self.block if kind in _UNDIVIDED else self.block * self.n)
        self.device = device
        sends = self.rank == 0 or kind is not CollectiveKind.SCATTER
        receives = kind not in _IN_PLACE and (self.rank == 0 or kind is not CollectiveKind.GATHER)
        self.given = self._given(self.rank) if sends else None
        self.input = self.given.clone() if self.given is not None else None
        blocks = self.n if kind in _RECEIVES_ALL else 1
        self.output = torch.zeros(blocks * self.block, device=device) if receives else None

    def _given(self, rank: int) -> Tensor:
        elements = self.block * (self.n if self.kind in _SENDS_ALL else 1)
        places = torch.arange(elements, device=self.device, dtype=torch.int64)
        return ((places + rank) % _PERIOD).float()

    def prepare(self) -> None:
        if self.output is None and self.input is not None and self.given is not None:
            self.input.copy_(self.given)
        elif self.output is not None:
            self.output.fill_(-1)

    def by_schedule(self, communicator: Communicator, schedule: Schedule) -> Callable[[], object]:
        return lambda: communicator.run(schedule, self.input, self.output)

    def by_backend(self) -> Callable[[], object]:
        """The backend's collective; for reduce-scatter the engine's own, as gloo's is an all-reduce and never used."""
        group, root = self.group, dist.get_global_rank(self.group, 0)
        input: Any = self.input  # None on some ranks, as the backend expects
        output: Any = self.output
        sent = self._blocks(input) if self.kind is CollectiveKind.SCATTER else None
        received = self._blocks(output) if self.kind is CollectiveKind.GATHER else None
        calls: dict[CollectiveKind, Callable[[], object]] = {
            CollectiveKind.ALL_REDUCE: lambda: dist.all_reduce(input, group=group),
            CollectiveKind.BROADCAST: lambda: dist.broadcast(input, root, group=group),
            CollectiveKind.REDUCE: lambda: dist.reduce(input, root, group=group),
            CollectiveKind.ALL_GATHER: lambda: all_gather(output, input, group),
            CollectiveKind.REDUCE_SCATTER: lambda: reduce_scatter_sum(output, input, group),
            CollectiveKind.ALL_TO_ALL: lambda: dist.all_to_all_single(output, input, group=group),
            CollectiveKind.GATHER: lambda: dist.gather(input, received, root, group=group),
            CollectiveKind.SCATTER: lambda: dist.scatter(output, sent, root, group=group),
            CollectiveKind.SEND_RECV: self._pass_on,
        }
        return calls[self.kind]

    def _blocks(self, tensor: Tensor | None) -> list[Tensor] | None:
        return None if tensor is None else list(tensor.view(self.n, -1).unbind())

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
        """The expected result, computed locally from every rank's input; None if this rank gets nothing."""
        own = slice(self.rank * self.block, (self.rank + 1) * self.block)
        everyone = (self._given(rank) for rank in range(self.n))
        match self.kind:
            case CollectiveKind.REDUCE | CollectiveKind.GATHER if self.rank:
                return None
            case CollectiveKind.ALL_REDUCE | CollectiveKind.REDUCE:
                return reduce(Tensor.add_, everyone)
            case CollectiveKind.REDUCE_SCATTER:
                return reduce(Tensor.add_, everyone)[own]
            case CollectiveKind.ALL_GATHER | CollectiveKind.GATHER:
                return torch.cat(list(everyone))
            case CollectiveKind.ALL_TO_ALL:
                return torch.cat([given[own] for given in everyone])
            case CollectiveKind.BROADCAST:
                return self._given(0)
            case CollectiveKind.SCATTER:
                return self._given(0)[own]
            case CollectiveKind.SEND_RECV:
                return self._given(self.rank - 1) if self.rank else None


# -- requests on many ranks --------------------------------------------------------------------------

PRELOAD = ("torch", "shardwise.measure.collectives.run")


def measure_in(pool: Pool, request: CollectiveRequest, timeout_seconds: float = 600) -> list[MeasuredCollective]:
    measured: list[MeasuredCollective] = pool.run(
        _work, request.cluster.devices, request, timeout_seconds=timeout_seconds
    )[0]
    return measured


def measure_as_rank(rank: Rank, requests: Sequence[CollectiveRequest], device: str) -> list[MeasuredCollective]:
    """In a world that a launcher has started: every rank calls this."""
    with process_group(rank.number, rank.world, rank.store, device=device):
        return [result for request in requests for result in measure(request, torch.device(device))]


def _work(place: WorkerPlace, request: CollectiveRequest) -> list[MeasuredCollective]:
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        return measure(request, torch.device("cpu"))


def measure(request: CollectiveRequest, device: torch.device) -> list[MeasuredCollective]:
    """Called by every rank of the world; all return the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in request.level.groups(world)]
    group = next(group for ranks, group in groups if rank in ranks)
    communicator = Communicator(group)
    results: list[MeasuredCollective] = []
    too_long: set[str] = set()
    for size in request.sizes:
        for algorithm in request.algorithms:
            if algorithm in too_long:
                continue
            operation = Operation(request.kind, group, size, device)
            schedule = _schedule(request, algorithm, operation.size_bytes)
            run = operation.by_schedule(communicator, schedule) if schedule else operation.by_backend()
            result = _timed(request, algorithm, operation, run)
            results.append(result)
            if result.median_seconds > request.most_seconds:
                too_long.add(algorithm)
    return results


def _schedule(request: CollectiveRequest, algorithm: str, size: int) -> Schedule | None:
    if algorithm == BACKEND:
        return None
    if algorithm == AUTO:
        return choose(request.kind, size, request.cluster, request.level.runs, AUTO).schedule
    return build_schedule(request.kind, by_schedules(request.cluster, request.level.runs), algorithm, size)


def _timed(
    request: CollectiveRequest, algorithm: str, operation: Operation, run: Callable[[], object]
) -> MeasuredCollective:
    """Times every run by itself, from a barrier on; the slowest rank's time counts."""
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
            each = max(_slowest(seconds)[-1], 1e-9)
            repeats = max(1, min(request.repeats, int(request.most_seconds / each)))
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


def _slowest(seconds: list[float]) -> list[float]:
    """The slowest rank's time of each run, exchanged by the CPU backend, which always exists."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(slowest) for slowest in times]
