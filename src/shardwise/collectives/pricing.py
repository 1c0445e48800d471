"""The price of a schedule on a network: every round waits for its longest route and its busiest link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shardwise.collectives.arrays import checked_size
from shardwise.collectives.routes import Link, Router, expand
from shardwise.collectives.schedule import Round, Schedule
from shardwise.collectives.topology import Topology
from shardwise.collectives.work import CollectiveCost, Work, settle
from shardwise.spec.errors import SpecError


def price_schedule(
    schedule: Schedule, topology: Topology, size_bytes: Any, groups: Sequence[Sequence[int]] | None = None
) -> CollectiveCost:
    """What ``schedule`` costs when every list of ranks in ``groups`` runs it at once (default: ranks 0..n-1).

    A round costs the largest route latency + the busiest directed link's bytes / rate; a level's rounds are
    summed before its ramp and startup are applied, as in the closed forms.
    """
    size = checked_size(size_bytes)
    wide, interleaved = expand(topology)
    lists = [list(group) for group in groups] if groups is not None else [list(range(schedule.n))]
    for ranks in lists:
        if len(ranks) != schedule.n or not all(0 <= rank < topology.size for rank in ranks):
            problem = f"a group of {len(ranks)} ranks runs a schedule for {schedule.n} on {topology.size} devices"
            raise SpecError("groups", problem, "give every group one device per rank of the schedule")
    placed = [[ranks[member] for member in group] for group in lists for ranks in interleaved]
    router = Router(wide)
    hops: dict[int, int] = defaultdict(int)
    chunks: dict[int, int] = defaultdict(int)
    for one in schedule.rounds:
        for level, count in _longest(one, router, placed):
            hops[level] += count
        for level, count in _busiest(one, router, placed):
            chunks[level] += count
    chunk = size * schedule.chunk_fraction
    used = {level: Work(hops[level], chunks[level] * chunk) for level in hops.keys() | chunks.keys()}
    return settle(topology, used, volume_of(schedule, size), schedule.algorithm, exact=True)


def _longest(transfers: Round, router: Router, groups: list[list[int]]) -> list[tuple[int, int]]:
    """Hops of the slowest route, on its level; the other levels in use get 0."""
    levels = router.topology.levels
    most: dict[int, int] = {}
    for ranks in groups:
        for t in transfers:
            route = router.route(ranks[t.src], ranks[t.dst])
            most[route.level] = max(most.get(route.level, 0), route.hops)
    slowest = max(most, key=lambda level: (most[level] * levels[level].latency, level), default=None)
    return [(level, most[level] if level == slowest else 0) for level in most]


def _busiest(transfers: Round, router: Router, groups: list[list[int]]) -> list[tuple[int, int]]:
    """Chunks on the slowest link, on its level."""
    levels = router.topology.levels
    loads: dict[Link, int] = defaultdict(int)
    for ranks in groups:
        for t in transfers:
            count = len(t.chunks)
            for link in router.route(ranks[t.src], ranks[t.dst]).links:
                loads[link] += count
    most: dict[int, int] = defaultdict(int)
    for link, load in loads.items():
        level = link[0]
        assert isinstance(level, int)
        most[level] = max(most[level], load)
    slowest = max(most, key=lambda level: (most[level] / levels[level].rate, level), default=None)
    return [] if slowest is None else [(slowest, most[slowest])]


def volume_of(schedule: Schedule, size: Any) -> Work:
    """Steps and bytes per rank of a schedule; messages count once, however many hops they take."""
    sent, received = [0] * schedule.n, [0] * schedule.n
    for one in schedule.rounds:
        for t in one:
            sent[t.src] += len(t.chunks)
            received[t.dst] += len(t.chunks)
    chunk = size * schedule.chunk_fraction
    steps = len(schedule.rounds)
    return Work(0, 0, steps, max(sent) * chunk, max(received) * chunk, sum(sent) * chunk)
