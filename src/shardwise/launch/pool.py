"""Worker processes on this machine that are started once and then called many times, each time as a new world."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

from shardwise.launch.owned import OwnedFolder
from shardwise.spec.errors import SpecError, shown

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store

MOST_CALLS = 12  # per worker: PyTorch's caches keep some groups of earlier worlds, whose threads wake up
_AGAIN = "run it again; a process that the system killed needs more memory"
VICTIMS_SECONDS = 1.0  # how long others may take to fail after the first: their messages only repeat its


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's rank and world in one call."""

    rank: int
    world: int
    rendezvous_file: str | Store  # new for each call, shared by all ranks; a store for ranks of other launchers


class WorkerError(Exception):
    """A worker failed; ``rank`` failed first, the others are usually its victims."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class RankLost(SpecError):
    status = 1


@contextmanager
def told_in_one_line(again: str = _AGAIN) -> Iterator[None]:
    """Turns the WorkerError of a worker that failed or was lost into a RankLost with the remedy ``again``."""
    try:
        yield
    except WorkerError as error:
        why = error.reason.strip().splitlines()[-1]
        raise RankLost(f"rank {error.rank}", f"was lost ({shown(why, 200)})", again) from None


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    calls: int = 0


class Pool:
    """``run(function, world, *arguments)`` calls ``function(place, *arguments)`` on ``world`` processes.

    ``preload`` names modules that are imported once, before the workers fork from a common parent. A failure or a
    timeout ends the workers that took part; the next call starts new ones.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: dict[int, _Worker] = {}  # by rank
        self._folder = OwnedFolder("pool")
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout_seconds: float = 300) -> list[Any]:
        """What each rank returned; raises `WorkerError` for the first rank that failed."""
        self._start(world)
        self._calls += 1
        rendezvous = str(self._folder.path / f"call-{self._calls}")
        taking_part = [self._workers[rank] for rank in range(world)]
        for rank, worker in enumerate(taking_part):
            worker.calls += 1
            worker.connection.send((function, WorkerPlace(rank, world, rendezvous), arguments))
        try:
            results = self._collect(taking_part, timeout_seconds)
        except BaseException:
            self._end(taking_part)
            raise
        self._end([worker for worker in taking_part if worker.calls >= MOST_CALLS])
        return results

    def close(self) -> None:
        self._end(list(self._workers.values()))
        self._folder.close()

    def initializer(self, rank: int) -> Callable[[], None] | None:
        """What the worker of ``rank`` runs before its first call; it is pickled."""
        return None

    def _start(self, world: int) -> None:
        for rank in range(world):
            if rank in self._workers:
                continue
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self.initializer(rank)), daemon=True)
            process.start()
            theirs.close()
            self._workers[rank] = _Worker(process, ours)

    def _collect(self, workers: list[_Worker], timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[float, WorkerError] = {}  # by when they happened
        pending: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_seconds
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    failed_at, value = workers[rank].connection.recv()
                except (EOFError, ConnectionError):
                    failed_at, value = 0.0, "the process ended"
                if failed_at is None:
                    results[rank] = value
                else:
                    failures.setdefault(failed_at, WorkerError(rank, value))
                    deadline = min(deadline, time.monotonic() + VICTIMS_SECONDS)
        if failures:
            raise failures[min(failures)]
        if pending:
            raise WorkerError(min(pending.values()), f"no answer within {timeout_seconds:g} s")
        return [results[rank] for rank in range(len(workers))]

    def _end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = {rank: worker for rank, worker in self._workers.items() if worker not in workers}


def _serve(connection: Connection, initializer: Callable[[], None] | None) -> None:
    """The main loop of a worker: takes calls and answers them until the pipe closes."""
    if initializer is not None:
        initializer()
    gc.freeze()  # preloaded objects stay, so the collector need not scan them again
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            function, place, arguments = pickle.loads(call)
            answer: tuple[float | None, Any] = (None, function(place, *arguments))
        except BaseException:
            answer = (time.time(), traceback.format_exc())
        try:
            connection.send(answer)
        except ConnectionError:  # the caller is gone
            os._exit(0)
        del answer
        gc.collect()  # models in cycles keep their process groups: each has threads of gloo that wake up all the time
