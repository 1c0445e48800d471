"""A run on fewer devices than it was planned for: the planner's split for what is left, until there are more again.

The batches stay the same, and checkpoints are loaded under any layout: only the split changes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.launch.ray.placement import RayNode, bundle_size, bundle_sizes
from shardwise.launch.targets.hosts import Agent, HostRanks
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.space import plain_strategy
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

PLAN_SECONDS = 1.0
_LOOK_SECONDS = 3.0
_DEGREES = ("dp", "tp", "pp")


def job_for(job: Job, devices: int) -> Job | None:
    """The same job with the planner's best split for so many of its devices; None if it has none."""
    if devices == job.strategy.world:
        return job
    try:
        cluster = job.cluster.with_devices(devices)
    except SpecError:  # not a whole number of nodes
        return None
    for name in _DEGREES:  # the search needs some valid split to begin with
        try:
            begin = replace(job, cluster=cluster, strategy=_split(job, name, devices))
            found = plan(Request(begin, time_limit_seconds=PLAN_SECONDS))
        except SpecError:
            continue
        if isinstance(found, Plan) and _sequences(found.best.job) == _sequences(job):
            return found.best.job
    return None


class SmallerSplits:
    """The splits of a job for fewer devices, at least ``least``; each is planned once."""

    def __init__(self, job: Job, least: int) -> None:
        self.job, self.least = job, least
        self._planned: dict[int, Job | None] = {}

    def on(self, nodes: Sequence[RayNode], more_than: int = 0) -> Iterator[Job]:
        """Those that the nodes hold, for most devices first."""
        most = min(self.job.strategy.world, sum(node.room for node in nodes))
        for devices in range(most, max(self.least, more_than + 1) - 1, -1):
            if devices not in self._planned:
                self._planned[devices] = job_for(self.job, devices)
            found = self._planned[devices]
            if found is None:
                continue
            if bundle_size(bundle_sizes(found.strategy, found.cluster.node_devices), devices, nodes) is not None:
                yield found


class ElasticRanks(HostRanks):
    """Ranks that save and end when there are ``more`` devices for them; then they start ``again`` on those."""

    def __init__(
        self,
        agents: Sequence[Agent],
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        more: Callable[[], bool],
    ) -> None:
        super().__init__(agents, command, folder, environment)
        self._more, self._looked = more, time.monotonic()

    def poll(self) -> None:
        super().poll()
        now = time.monotonic()
        if self.again or now - self._looked < _LOOK_SECONDS or len(self.running) < len(self.all):
            return
        self._looked = now
        if all(rank.where[0] == "step" for rank in self.all) and self._more():
            self.again = True
            self.send_signal(signal.SIGTERM)


def _split(job: Job, name: str, devices: int) -> Strategy:
    """All devices along one dimension, and what no search varies."""
    degree: dict[str, Any] = {name: devices}
    return replace(plain_strategy(job), **degree)


def _sequences(job: Job) -> int:
    return job.training.sequences(job.strategy.data_parallel)
