"""The ranks of a job on this machine, on its devices or virtual nodes; with `restarts.shrink`, on those that are left.

A virtual node is lost when the others cannot reach it. A device counts as lost only when restarts did not help its
rank: one process that ends says nothing about the device, but on a broken GPU the next one ends as well.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch.elastic.splits import SmallerSplits, bundle_size_of
from shardwise.launch.emulate.network import Network, Reach
from shardwise.launch.job_file import write_job
from shardwise.launch.keepers import Keepers, place_here
from shardwise.launch.outcome import Failure
from shardwise.launch.ranks import Gang, NodeSeats, RankGroup, RankProcesses
from shardwise.launch.targets.host_file import Host
from shardwise.launch.targets.hosts import HostRanks
from shardwise.layout.groups import node_of
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.job import Job
from shardwise.spec.units import counted

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
