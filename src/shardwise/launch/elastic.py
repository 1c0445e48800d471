"""Runs that go on with fewer devices than planned, and grow again: the planner's split for those that are left.

Batches stay the same, and a checkpoint can be loaded under any layout: only the split changes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from shardwise.launch.emulate.network import Network, Reach
from shardwise.launch.keepers import Keepers, place_here
from shardwise.launch.outcome import Failure
from shardwise.launch.ranks import Gang, NodeSeats, RankGroup, RankProcesses
from shardwise.launch.resume import write_job
from shardwise.launch.targets.hosts import Host, HostRanks
from shardwise.launch.targets.registry import StartsRanks
from shardwise.layout.groups import along, division, node_of
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.space import plain_strategy
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import counted

PLAN_SECONDS = 1.0
_DEGREES = ("dp", "tp", "pp")


def job_for(job: Job, devices: int) -> Job | None:
    """The job with the planner's best split for ``devices`` of its devices; None if there is none."""
    if devices == job.strategy.world:
        return job
    try:
        cluster = replace(job.cluster, wiring=None).with_devices(devices)  # the wiring described all devices
    except SpecError:  # not a whole number of nodes
        return None
    run = replace(job.run, emulate=_emulation(job.run.emulate, devices))
    for name in _DEGREES:  # the search needs some valid split to begin with
        try:
            begin = replace(job, cluster=cluster, strategy=_split(job, name, devices), run=run)
            planned = plan(Request(begin, time_limit_seconds=PLAN_SECONDS))
        except SpecError:
            continue
        if isinstance(planned, Plan) and _sequences(planned.best.job) == _sequences(job):
            return planned.best.job
    return None


class SmallerSplits:
    """The splits of a job for fewer devices, at least ``least``; each is planned once."""

    def __init__(self, job: Job, least: int) -> None:
        self.job, self.least = job, least
        self._planned: dict[int, Job | None] = {}

    def on(self, rooms: Sequence[int], more_than: int = 0) -> Iterator[Job]:
        """The splits that fit nodes with ``rooms`` for ranks (of each node how many), most devices first."""
        most = min(self.job.strategy.world, sum(rooms))
        for devices in range(most, max(self.least, more_than + 1) - 1, -1):
            if devices not in self._planned:
                self._planned[devices] = job_for(self.job, devices)
            split = self._planned[devices]
            if split is not None and bundle_size_of(split, rooms) is not None:
                yield split


def bundle_sizes(strategy: Strategy, node_devices: int) -> list[int]:
    """Sizes of bundles (consecutive ranks that share a node), best first.

    The best has as many ranks as a node of the plan; all hold whole tensor-parallel groups.
    """
    planned = min(node_devices, strategy.world)
    sizes = [size for size in range(planned, 0, -1) if strategy.world % size == 0]
    groups = division(strategy, along(strategy, "tp"))
    whole = [size for size in sizes if all(len({node_of(rank, size) for rank in group}) == 1 for group in groups)]
    return whole or sizes[:1]  # a plan whose TP crosses nodes: keep its nodes as large as planned


def bundle_size(sizes: Sequence[int], world: int, rooms: Sequence[int]) -> int | None:
    """The first of ``sizes`` for which nodes with these ``rooms`` hold all ranks; None if there is none."""
    return next((size for size in sizes if sum(room // size for room in rooms) * size >= world), None)


def bundle_size_of(job: Job, rooms: Sequence[int]) -> int | None:
    return bundle_size(bundle_sizes(job.strategy, job.cluster.node_devices), job.strategy.world, rooms)


def _emulation(whole: Emulation | None, devices: int) -> Emulation | None:
    """The emulation of the nodes that are left; None for part of a node, or for a single node."""
    if whole is None or devices % whole.ranks_per_node or devices <= whole.ranks_per_node:
        return None
    return replace(whole, nodes=devices // whole.ranks_per_node)


def _split(job: Job, name: str, devices: int) -> Strategy:
    """All devices along one dimension; the rest of the strategy is what no search varies."""
    degree: dict[str, Any] = {name: devices}
    return replace(plain_strategy(job), **degree)


def _sequences(job: Job) -> int:
    return job.training.sequences(job.strategy.data_parallel)


# -- The ranks on this machine, on its devices or virtual nodes; with `restarts.shrink`, on those left
# A virtual node is lost when the others cannot reach it. A device counts as lost only when restarts did not help its
# rank: one process that ends says nothing about the device, but on a broken GPU the next one ends as well.


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_SECONDS = 0.2


@dataclass
class HereTarget:
    """A place, by its number, is a virtual node of ``network`` or, without one, a device of this machine."""

    whole: Job  # as planned
    folder: RunFolder
    network: Network | None = None
    keepers: Keepers | None = None
    reach: Reach | None = None
    job: Job = field(init=False)  # as it runs now
    used: tuple[int, ...] = field(init=False)  # in the last attempt: the place of every bundle of ranks
    each: int = field(init=False)  # consecutive ranks in a bundle
    notes: Sequence[str] = ()
    _left_out: dict[int, float] = field(default_factory=dict)  # by place: when it is tried again
    _begun: bool = False  # the last attempt had its places

    def __post_init__(self) -> None:
        self.job = self.whole
        self.each = 1 if self.network is None else self.network.emulation.ranks_per_node
        self.used = tuple(range(self._places))
        self.splits = SmallerSplits(self.whole, self.whole.run.restarts.least_devices)

    @property
    def _places(self) -> int:
        return self.whole.strategy.world if self.network is None else self.network.emulation.nodes

    @property
    def shrinks(self) -> bool:
        return self.whole.run.restarts.shrink

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stopped: Callable[[], bool]
    ) -> RankGroup:
        """Starts one attempt, after waiting for the places of the last attempt to be there again."""
        if self.shrinks:
            there = self._awaited(stopped)
            self._begun = self._laid_out(there)
            if not self._begun:
                least = counted(self.whole.run.restarts.least_devices, "device")
                why = f"no layout of {least} or more for what is left of {counted(self._places, 'place')}: {there}"
                return HostRanks.lost([(Host("here"), range(self.whole.strategy.world))], folder, why)
        seats = None
        if self.network is not None:
            seats = NodeSeats(self.network, self.used, self.each)
            if self.keepers is not None:
                self.keepers.use([place_here(self.network, node) for node in self.used])
        again = time.monotonic() + self.whole.run.restarts.retry
        self._left_out = {place: min(until, again) for place, until in self._left_out.items()}
        gang = Gang.all_here(self.job.strategy.world)
        return RankProcesses(command, gang, folder, {**environment, **self._visible()}, seats)

    def better(self) -> str | None:
        """Why to restart: places have come back that make room for more ranks; None if not."""
        now = self.job.strategy.world
        if not self.shrinks or now == self.whole.strategy.world:
            return None
        left_out, again = self._left_out, time.monotonic()
        self._left_out = {place: until for place, until in left_out.items() if until > again}
        larger = next(self.splits.on(self._rooms(self._there()), more_than=now), None)
        if larger is None:
            self._left_out = left_out
            return None
        return f"there is room for {larger.strategy.world} ranks instead of {now}"

    def leave_out(self, failure: Failure) -> str | None:
        """Leaves out the place of the rank that failed, if a single rank is to blame."""
        if not self._begun or failure.rank is None:
            return None
        place = self.used[node_of(failure.rank, self.each)]
        self._left_out[place] = math.inf  # at least until an attempt has run without it
        if next(self.splits.on(self._rooms(self._there())), None) is None:
            del self._left_out[place]
            return None
        kind = "device" if self.network is None else "node"
        return f"goes on without {kind} {place}"

    def close(self) -> None:
        if self.reach is not None:
            self.reach.close()

    # -- which places ----------------------------------------------------------------------------------------

    def _awaited(self, stopped: Callable[[], bool]) -> tuple[int, ...]:
        deadline = time.monotonic() + self.whole.run.restarts.wait
        while True:
            there = self._there()
            missing = {place for place in self.used if place not in self._left_out} - set(there)
            if not missing or stopped() or time.monotonic() >= deadline:
                return there
            time.sleep(_POLL_SECONDS)

    def _there(self) -> tuple[int, ...]:
        """The places that can be used now. Only `better` brings back those left out, to let a training run grow."""
        reached = range(self._places) if self.reach is None else self.reach.nodes()
        return tuple(place for place in reached if place not in self._left_out)

    def _rooms(self, places: Sequence[int]) -> list[int]:
        """How many ranks each node has room for; all devices of this machine are one node."""
        if self.network is None:
            return [len(places)]
        return [self.network.emulation.ranks_per_node] * len(places)

    def _laid_out(self, places: Sequence[int]) -> bool:
        """Adopts the layout for these places, if there is one; whether there is."""
        if len(places) == self._places:
            job, each = self.whole, 1 if self.network is None else self.network.emulation.ranks_per_node
        else:
            smaller = next(self.splits.on(self._rooms(places)), None)
            size = None if smaller is None else bundle_size_of(smaller, self._rooms(places))
            if smaller is None or size is None:
                return False
            job, each = smaller, 1 if self.network is None else size
        bundles = [place for place, room in zip(places, self._bundles(places, each)) for _ in range(room)]
        if job != self.job:
            write_job(job, self.folder)
        self.job, self.each, self.used = job, each, tuple(bundles[: -(-job.strategy.world // each)])
        return True

    def _bundles(self, places: Sequence[int], each: int) -> list[int]:
        """How many of ``each`` ranks every place holds."""
        here = 1 if self.network is None else self.network.emulation.ranks_per_node
        return [here // each] * len(places)

    def _visible(self) -> dict[str, str]:
        """The variable that names the GPUs in use, if some are left out."""
        if self.network is not None or self.whole.run_device != "cuda" or len(self.used) == self._places:
            return {}
        named = os.environ.get(_VISIBLE)
        names = named.split(",") if named else [str(number) for number in range(self._places)]
        return {_VISIBLE: ",".join(names[place] for place in self.used)}


# -- Pipelines that are cut anew during the run: the ranks save, end, and restart with the better cut


class FindsRecuts(Protocol):
    """Finds better cuts of a run from the profiles that its ranks record."""

    def better_cut(self, since_ns: int) -> tuple[Job, str] | None:
        """The run's job with a better cut, from profiles newer than ``since_ns``, and why it is better."""


@dataclass
class RecutTarget:
    """The ranks of ``target``, with the cuts that ``recuts`` finds."""

    target: StartsRanks
    recuts: FindsRecuts
    folder: RunFolder
    _next: Job | None = None
    _since_ns: int = 0

    @property
    def notes(self) -> Sequence[str]:
        return self.target.notes

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stopped: Callable[[], bool]
    ) -> RankGroup:
        if self._next is not None:
            write_job(self._next, self.folder)
        self._next, self._since_ns = None, time.time_ns()
        return self.target.start(command, folder, environment, stopped)

    def better(self) -> str | None:
        why = self.target.better()
        if why is not None:
            return why
        better = self.recuts.better_cut(self._since_ns)
        if better is None:
            return None
        self._next, why = better
        return why

    def leave_out(self, failure: Failure) -> str | None:
        return self.target.leave_out(failure)
