"""Which groups sum gradients, and by what: the backend's own collective, or one of our schedules.

Where `calibrate` has measured our executor (``schedules`` of every level of a cluster), "auto" takes the cheaper of the
two; a named algorithm is always run by our executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.collectives import CollectiveKind, Schedule, Topology, build_schedule, collective_cost, simulated_seconds
from shardwise.collectives.build import require_schedule
from shardwise.collectives.cost import candidates, without_unit_levels
from shardwise.layout.groups import RankRun
from shardwise.layout.network import spanned
from shardwise.layout.payloads import Share
from shardwise.layout.sharding import SharedRanks, dense_ranks, divided_over, expert_ranks
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job

PAYS_BELOW = 0.9  # of the backend's time: prices are not exact to a tenth
MOST_RANKS = 64  # in a group whose schedules are built to be compared
UNNAMED = ("auto", "textbook")


def by_schedules(cluster: Cluster, runs: tuple[RankRun, ...]) -> Topology:
    """The group's network for our executor, which overlaps the levels."""
    network = spanned(cluster.run_by_schedules(), runs, "strategy.collective")
    assert network is not None
    return replace(network, pipelined_levels=True)


def measured_schedules(cluster: Cluster, runs: tuple[RankRun, ...]) -> Topology | None:
    """The same, if the backend is gloo and our executor was measured; NCCL's own collectives are better."""
    measured = all(level.schedules is not None for level in cluster.levels if level.width > 1)
    if not runs or cluster.library != "gloo" or not measured:
        return None
    network = by_schedules(cluster, runs)
    return network if network.size <= MOST_RANKS else None


def named_on(wanted: str, network: Topology) -> str:
    """A ring over several levels is the flat one."""
    slim, _ = without_unit_levels(network)
    return "flat_ring" if wanted == "ring" and len(slim.levels) > 1 else wanted


@dataclass(frozen=True)
class Choice:
    """What runs a gradient reduction, with its time and that of the backend's own collective."""

    schedule: Schedule | None  # none if no schedule is known to be better than the backend's own collective
    seconds: float
    backend_seconds: float

    @property
    def algorithm(self) -> str:
        return self.schedule.algorithm if self.schedule is not None else "the backend's own"


@lru_cache(maxsize=1024)
def choose(kind: CollectiveKind, size: float, cluster: Cluster, runs: tuple[RankRun, ...], wanted: str) -> Choice:
    """The schedule of the algorithm that is ``wanted``; for "auto" the cheapest of all, if it is worth it.

    Raises SpecError if the group's network has no schedule by that name.
    """
    network = spanned(cluster, runs, "strategy.collective")
    assert network is not None
    backend = float(collective_cost(kind, size, network, "auto").seconds)
    if wanted in UNNAMED:
        cheapest = _cheapest(kind, size, cluster, runs) if wanted == "auto" else None
        if cheapest is None or cheapest[0] > PAYS_BELOW * backend:
            return Choice(None, backend, backend)
        seconds, schedule = cheapest
        return Choice(schedule, seconds, backend)
    ours = by_schedules(cluster, runs)
    schedule = build_schedule(kind, ours, named_on(wanted, ours), size)
    return Choice(schedule, simulated_seconds(schedule, ours, size), backend)


def _cheapest(
    kind: CollectiveKind, size: float, cluster: Cluster, runs: tuple[RankRun, ...]
) -> tuple[float, Schedule] | None:
    network = measured_schedules(cluster, runs)
    if network is None or size <= 0:
        return None
    priced: list[tuple[float, str]] = []
    for name in candidates(kind, size, network):
        try:
            require_schedule(kind, network, name)
        except SpecError:
            continue
        priced.append((float(collective_cost(kind, size, network, name).seconds), name))
    best: tuple[float, Schedule] | None = None
    for _, name in sorted(priced)[:3]:  # with overlap these are lower bounds until a schedule is built
        schedule = build_schedule(kind, network, name, size)
        seconds = simulated_seconds(schedule, network, size)
        if best is None or seconds < best[0]:
            best = seconds, schedule
    return best


class GradientGroup(NamedTuple):
    """Ranks that sum gradients, by the name of the group in the engine's mesh."""

    name: str
    share: Share
    kind: CollectiveKind
    runs: tuple[RankRun, ...]


def gradient_groups(job: Job) -> Iterator[GradientGroup]:
    """The groups over which gradients are summed."""
    strategy, shards = job.strategy, divided_over(job.strategy)
    ranks: list[tuple[str, Share, SharedRanks]] = [("", Share.DENSE, dense_ranks(strategy, shards))]
    if job.model.moe is not None:
        ranks.append(("expert_", Share.EXPERTS, expert_ranks(strategy, shards)))
    for prefix, share, shared in ranks:
        if shared.sharded:
            yield GradientGroup(f"{prefix}shard", share, CollectiveKind.REDUCE_SCATTER, shared.sharded)
        elif shared.replicas:
            yield GradientGroup(f"{prefix}replicate", share, CollectiveKind.ALL_REDUCE, shared.replicas)


def require_gradient_schedules(job: Job) -> None:
    """Raises SpecError if `strategy.collective` has no schedule on some group that sums gradients."""
    wanted = job.strategy.collective
    if wanted in UNNAMED:
        return
    for group in gradient_groups(job):
        network = by_schedules(job.cluster, group.runs)
        try:
            require_schedule(group.kind, network, named_on(wanted, network))
        except SpecError as error:
            raise SpecError("strategy.collective", error.problem, error.remedy) from None
