"""The price of a schedule on a network: every round waits for its longest route and its busiest link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.collectives.arrays import checked_size
from shardwise.collectives.schedule import Round, Schedule, Transfer
from shardwise.collectives.shapes import Axis, FullyConnected, Grid, Shape, Switch, Tree
from shardwise.collectives.topology import Topology
from shardwise.collectives.work import CollectiveCost, Work, settle
from shardwise.spec.errors import SpecError

Link = tuple[Hashable, ...]


@dataclass(frozen=True)
class Route:
    """Hops and directed links of one message, all on one level."""

    level: int
    hops: int
    links: tuple[Link, ...]


def expand(topology: Topology) -> tuple[Topology, list[list[int]]]:
    """The network without strided axes, and the rank lists of all groups that share it.

    A stride of s on an axis stands for s interleaved groups; here they are written out. In a network made by `place`
    only the first axis with more than one member is strided; shared ports are divided accordingly.
    """
    levels, rails = [], 1
    groups = [[0]]
    unit = 1
    for level in topology.levels:
        ports = None if level.ports is None else level.ports * rails
        levels.append(replace(level, shape=level.shape.expanded(), ports=ports))
        for size, stride in level.shape.strides:
            groups = [
                [member + (index * stride + offset) * unit for index in range(size) for member in group]
                for offset in range(stride)
                for group in groups
            ]
            unit *= size * stride
            rails *= stride
    return replace(topology, levels=tuple(levels)), groups


class Router:
    """Routes between the devices of a topology without strides."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._below = [topology.below(i) for i in range(len(topology.levels))]
        self._known: dict[tuple[int, int], Route] = {}

    def route(self, src: int, dst: int) -> Route:
        if (src, dst) not in self._known:
            self._known[src, dst] = self._find(src, dst)
        return self._known[src, dst]

    def _find(self, src: int, dst: int) -> Route:
        """A route over the lowest common level only; a device's rail is its index below, modulo the ports."""
        for index in reversed(range(len(self._below))):
            level, below = self.topology.levels[index], self._below[index]
            here, there = src // below % level.size, dst // below % level.size
            if here == there:
                continue
            ports = level.ports or below
            rails = src % below % ports, dst % below % ports
            instance = src // (below * level.size)
            hops, path = _path(level.shape, here, there, rails)
            return Route(index, hops, tuple((index, instance, *link) for link in path))
        raise AssertionError(f"{src} sends to itself")


def _path(shape: Shape, src: int, dst: int, rails: tuple[int, int]) -> tuple[int, list[Link]]:
    """Hops and links from member ``src`` to ``dst``; every rail has a network of its own."""
    match shape:
        case Switch():
            return 1, [("out", src, rails[0]), ("in", dst, rails[1])]
        case FullyConnected():
            return 1, [("pair", src, dst, rails[0])]
        case Tree():
            height = (src ^ dst).bit_length()
            up = [("up", h, src >> h, rails[0]) for h in range(height)]
            return 1, [*up, *(("down", h, dst >> h, rails[0]) for h in range(height))]
        case Grid():
            links = [(*link, rails[0]) for link in _walk(shape, src, dst)]
            return len(links), links


def _walk(grid: Grid, src: int, dst: int) -> Iterator[Link]:
    """Dimension-ordered shortest route, axis 0 first."""
    here, unit = src, 1
    for number, axis in enumerate(grid.axes):
        assert axis.stride == 1
        start, end = src // unit % axis.size, dst // unit % axis.size
        distance, direction = _way(axis, start, end)
        for step in range(distance):
            yield number, here, direction
            at, after = (start + direction * step) % axis.size, (start + direction * (step + 1)) % axis.size
            here += (after - at) * unit
        unit *= axis.size


def _way(axis: Axis, start: int, end: int) -> tuple[int, int]:
    if not axis.is_ring:
        return abs(end - start), 1 if end > start else -1
    up = (end - start) % axis.size
    down = axis.size - up
    if up == 0:
        return 0, 1
    if up == down:
        return up, 1 if start % 2 == 0 else -1
    return min(up, down), 1 if up < down else -1


# -- round by round ----------------------------------------------------------------------------------


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
    for transfers in schedule.rounds:
        farthest, busiest = _demands(transfers, router, placed)
        late = max(farthest, key=lambda level: (farthest[level] * wide.levels[level].latency, level), default=None)
        slow = max(busiest, key=lambda level: (busiest[level] / wide.levels[level].rate, level), default=None)
        for level in farthest:  # a round waits for its slowest route and its slowest link only
            hops[level] += farthest[level] if level == late else 0
            chunks[level] += busiest[level] if level == slow else 0
    chunk = size * schedule.chunk_fraction
    used = {level: Work(hops[level], chunks[level] * chunk) for level in hops}
    return settle(topology, used, volume_of(schedule, size), schedule.algorithm, exact=True)


def _demands(transfers: Round, router: Router, groups: list[list[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """For every level in use: hops of the longest route, and chunks on the busiest link."""
    farthest: dict[int, int] = defaultdict(int)
    loads: dict[tuple[int, Link], int] = defaultdict(int)
    for ranks in groups:
        for t in transfers:
            route = router.route(ranks[t.src], ranks[t.dst])
            farthest[route.level] = max(farthest[route.level], route.hops)
            for link in route.links:
                loads[route.level, link] += len(t.chunks)
    busiest: dict[int, int] = defaultdict(int)
    for (level, _), load in loads.items():
        busiest[level] = max(busiest[level], load)
    return farthest, busiest


def volume_of(schedule: Schedule, size: Any) -> Work:
    """Steps and bytes per rank of a schedule; messages count once, however many hops they take."""
    sent, received = [0] * schedule.n, [0] * schedule.n
    for transfers in schedule.rounds:
        for t in transfers:
            sent[t.src] += len(t.chunks)
            received[t.dst] += len(t.chunks)
    chunk = size * schedule.chunk_fraction
    steps = len(schedule.rounds)
    return Work(0, 0, steps, max(sent) * chunk, max(received) * chunk, sum(sent) * chunk)


# -- message by message ------------------------------------------------------------------------------
# `price_schedule` lets every round wait for its slowest message, as the closed forms do. A rank of the executor waits
# only for what it needs: a chunk passes the fast and slow links of a ring in turn, and a fast link costs only its own
# latency.


def simulated_seconds(schedule: Schedule, topology: Topology, size_bytes: Any) -> float:
    """Seconds until the last message has arrived; links carry one message at a time, in the order of the rounds.

    The startup and the ramp of each level are added once, as in `price_schedule`.
    """
    size = float(checked_size(size_bytes))
    wide, interleaved = expand(topology)
    ends = [_ends(schedule, wide, ranks, size) for ranks in interleaved]
    once = sum(
        level.startup + float(cost.bandwidth_seconds) - float(cost.bytes) / level.rate
        for level, cost in zip(topology.levels, price_schedule(schedule, topology, size).levels)
        if cost.hops or cost.bytes
    )
    return max(ends, default=0.0) + once


def _ends(schedule: Schedule, topology: Topology, ranks: list[int], size: float) -> float:
    """When the last message arrives among ``ranks`` of the network."""
    router, chunk_bytes = Router(topology), size * schedule.chunk_fraction
    transfers, unlocks = _dependencies(schedule)
    free: dict[Link, float] = defaultdict(float)
    ready_at = [0.0] * len(transfers)
    last = 0.0
    for transfer, ready, unlocked in zip(transfers, ready_at, unlocks):
        route = router.route(ranks[transfer.src], ranks[transfer.dst])
        level = topology.levels[route.level]
        on_link = len(transfer.chunks) * chunk_bytes / level.rate
        for link in route.links:  # a message that waits for one link does not block another
            free[link] = max(ready, free[link]) + on_link
        arrived = max(free[link] for link in route.links) + route.hops * level.latency
        last = max(last, arrived)
        for later in unlocked:
            ready_at[later] = max(ready_at[later], arrived)
    return last


def _dependencies(schedule: Schedule) -> tuple[list[Transfer], list[list[int]]]:
    """All transfers in the order of their rounds, and which later ones wait for the arrival of each.

    A message waits for the newest arrival of each of its chunks at its sender; for a sum, for all that were added.
    """
    transfers: list[Transfer] = []
    unlocks: list[list[int]] = []
    newest: dict[tuple[int, int], set[int]] = {}  # what arrived last of a chunk at a rank
    for round_transfers in schedule.rounds:
        arrivals: dict[tuple[int, int], set[int]] = {}
        for transfer in round_transfers:
            number = len(transfers)
            before = set().union(*(newest.get((transfer.src, chunk), set()) for chunk in transfer.chunks))
            for earlier in before:
                unlocks[earlier].append(number)
            transfers.append(transfer)
            unlocks.append([])
            for chunk in transfer.chunks:
                arrivals.setdefault((transfer.dst, chunk), set()).add(number)
        for place, numbers in arrivals.items():
            summed = any(transfers[number].reduce for number in numbers)
            newest[place] = numbers | newest.get(place, set()) if summed else numbers
    return transfers, unlocks
