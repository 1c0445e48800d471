"""The ranks that measure: processes of a pool, or this process and others that a launcher has started."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.engine.mesh import silence_blas_fallback, store_of
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.groups import local_rank
from shardwise.run.environment import Started, host_name
from shardwise.spec.errors import SpecError

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store


Result = TypeVar("Result")
_LONGEST_SECONDS = 1800.0  # of one call
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Rank:
    """One of ``world`` ranks that measure at the same time; ``store`` is new for each call and shared by all."""

    number: int
    world: int
    ranks_per_host: int
    store: Store

    @property
    def first_of_host(self) -> bool:
        return local_rank(self.number, self.ranks_per_host) == 0


@dataclass(frozen=True)
class PoolRanks:
    """Processes of this machine, which counts as one host: virtual nodes share its resources.

    ``ranks_per_host`` makes virtual nodes count as hosts, for measurements between them.
    """

    pool: Pool
    world: int
    ranks_per_host: int | None = None
    longest_seconds: float = _LONGEST_SECONDS

    def run(self, function: Callable[..., Result], *arguments: Any) -> list[Result]:
        """What ``function(rank, *arguments)`` returned on every rank."""
        each = self.ranks_per_host or self.world
        return self.pool.run(_in_pool, self.world, each, function, arguments, timeout_seconds=self.longest_seconds)


def _in_pool(
    place: WorkerPlace, ranks_per_host: int, function: Callable[..., Result], arguments: tuple[Any, ...]
) -> Result:
    silence_blas_fallback()
    store = dist.FileStore(str(place.rendezvous_file), place.world)  # type: ignore[attr-defined]
    return function(Rank(place.rank, place.world, ranks_per_host, store), *arguments)


class StartedRanks:
    """Every rank makes the same calls, and gets the results of all ranks."""

    def __init__(self, here: Started, store: Store) -> None:
        self._here, self._store, self._calls = here, store, 0

    def run(self, function: Callable[..., Result], *arguments: Any) -> list[Result]:
        self._calls += 1
        here = self._here
        silence_blas_fallback()
        own: Store = dist.PrefixStore(f"calibrate-{self._calls}", self._store)  # type: ignore[attr-defined]
        result = function(Rank(here.rank, here.world, here.ranks_per_host, own), *arguments)
        own.set(f"found-{here.rank}", pickle.dumps(result))  # type: ignore[arg-type]
        names = [f"found-{rank}" for rank in range(here.world)]
        own.wait(names, timedelta(seconds=_LONGEST_SECONDS))
        return [pickle.loads(own.get(name)) for name in names]

    def leave(self) -> None:
        """Rank 0 leaves last, since it may host the store."""
        gone = self._store.add("left", 1)
        while self._here.rank == 0 and gone < self._here.world:
            time.sleep(_LOOK_SECONDS)
            gone = self._store.add("left", 0)


Ranks = PoolRanks | StartedRanks


@contextmanager
def started_ranks(here: Started) -> Iterator[StartedRanks]:
    ranks = StartedRanks(here, store_of(here))
    try:
        yield ranks
    except SpecError:  # raised on all ranks alike, so that all of them leave
        ranks.leave()
        raise
    ranks.leave()  # not after another failure, which only this rank may have


def hosts_of(ranks: Ranks) -> list[str]:
    """The host of every rank; raises SpecError unless all have equally many ranks, numbered host by host."""
    of_ranks = ranks.run(_host)
    count = of_ranks[0][1]
    for rank, own in enumerate(of_ranks):
        if own != (of_ranks[rank - local_rank(rank, count)][0], count):
            problem = f"rank {rank} is one of {own[1]} on {own[0]}, rank 0 is one of {count} on {of_ranks[0][0]}"
            raise SpecError("LOCAL_WORLD_SIZE", problem, "start equally many ranks on every host, host by host")
    return [name for name, _ in of_ranks]


def node_names(hosts: Sequence[str], ranks_per_host: int) -> list[str]:
    """The name of every node; with its number if several have the same name."""
    names = list(hosts[::ranks_per_host])
    return [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)]


def _host(rank: Rank) -> tuple[str, int]:
    return host_name(), rank.ranks_per_host


# -- the seconds of a call while the other processes of the node do the same -------------------------

ROUNDS = 7
ROUND_SECONDS = 0.02  # that a round takes at least: long compared with the clock's resolution and an interrupt


class StoreBarrier:
    """Lets processes start their measurements at the same time, so that each is measured under contention.

    It counts in a store instead of using a collective: what is measured has its own process group.
    """

    def __init__(self, store: Store, world: int) -> None:
        self._store = dist.PrefixStore("barrier", store)  # type: ignore[attr-defined]
        self._world, self._count = world, 0

    def wait(self) -> None:
        self._count += 1
        key = f"barrier-{self._count}"
        arrived = self._store.add(key, 1)
        while arrived < self._world:
            time.sleep(0.0005)
            arrived = self._store.add(key, 0)


def seconds_of(call: Callable[[], Any], device: torch.device, barrier: StoreBarrier) -> float:
    """The mean seconds of one call in an undisturbed round: other load on the machine only adds time."""
    call()
    repeats = max(1, round(ROUND_SECONDS / max(1e-7, _round(call, device, 1))))
    seconds = []
    for _ in range(ROUNDS):
        barrier.wait()
        seconds.append(_round(call, device, repeats))
    return undisturbed(seconds)


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def _round(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
