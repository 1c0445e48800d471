"""A run on fewer devices than planned: the planner's split for those that are left.

Batches stay the same, and a checkpoint can be loaded under any layout: only the split changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.layout.groups import along, division, node_of
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.space import plain_strategy
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

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
