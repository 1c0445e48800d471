"""Runs requests on the ranks of a pool, or on those of a world that others have started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.collectives import Schedule, build_schedule
from shardwise.cost.traffic.gradient_reduction import by_schedules, choose
from shardwise.engine.collectives import Communicator
from shardwise.engine.world import joined
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.measure.collectives.operation import Operation
from shardwise.measure.collectives.request import AUTO, BACKEND, Measured, Request, predicted

PRELOAD = ("torch", "shardwise.measure.collectives.run")


def measure_in(pool: Pool, request: Request, timeout_seconds: float = 600) -> list[Measured]:
    """On the processes of a pool."""
    found: list[Measured] = pool.run(_work, request.cluster.devices, request, timeout_seconds=timeout_seconds)[0]
    return found


def measure_as_rank(requests: Sequence[Request], rank: int, world: int, device: str) -> list[Measured]:
    """In a world that torchrun has started: every rank calls this, and meets the others where its environment says."""
    with joined(rank, world, None, device=device):
        return [one for request in requests for one in measure(request, torch.device(device))]


def _work(place: WorkerPlace, request: Request) -> list[Measured]:
    torch.set_num_threads(1)
    with joined(place.rank, place.world, place.meeting_file):
        return measure(request, torch.device("cpu"))


def measure(request: Request, device: torch.device) -> list[Measured]:
    """To be called by every rank of the world; all return the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in request.level.groups(world)]
    group = next(group for ranks, group in groups if rank in ranks)
    communicator = Communicator(group)
    found: list[Measured] = []
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


def _schedule(request: Request, algorithm: str, size: int) -> Schedule | None:
    if algorithm == BACKEND:
        return None
    if algorithm == AUTO:
        return choose(request.kind, size, request.cluster, request.level.runs, AUTO).schedule
    return build_schedule(request.kind, by_schedules(request.cluster, request.level.runs), algorithm, size)


def _timed(request: Request, algorithm: str, operation: Operation, run: Callable[[], object]) -> Measured:
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
    return Measured(
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


def _that_fit(request: Request, seconds: float) -> int:
    return max(1, min(request.repeats, int(request.most_seconds / max(seconds, 1e-9))))


def _slowest(seconds: list[float]) -> list[float]:
    """Of each run over all ranks, on a CPU backend that is always there."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(one) for one in times]
