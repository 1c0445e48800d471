"""When a schedule ends without barriers between rounds: what the executor does, message by message.

`price_schedule` lets every round wait for its slowest message, as the closed forms do. A rank of the executor waits
only for what it needs: of a ring through fast and slow links every chunk meets each of them in turn, and the fast ones
do not cost a slow one's latency.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any

from shardwise.collectives.arrays import checked_size
from shardwise.collectives.pricing import price_schedule
from shardwise.collectives.routes import Link, Router, expand
from shardwise.collectives.schedule import Schedule, Transfer
from shardwise.collectives.topology import Topology


def simulated_seconds(schedule: Schedule, topology: Topology, size_bytes: Any) -> float:
    """Seconds until the last message has arrived; links pass one message after the other, in the order they are ready.

    What a level costs once, its startup and its ramp, is added as in `price_schedule`.
    """
    size = float(checked_size(size_bytes))
    wide, interleaved = expand(topology)
    ends = [_ends(schedule, wide, ranks, size) for ranks in interleaved]
    levels = price_schedule(schedule, topology, size).levels
    once = sum(
        topology.levels[one.level_index].startup + float(one.bandwidth_seconds)
        - float(one.bytes) / topology.levels[one.level_index].rate
        for one in levels
        if one.hops or one.bytes
    )  # fmt: skip
    return max(ends, default=0.0) + once


def _ends(schedule: Schedule, topology: Topology, ranks: list[int], size: float) -> float:
    """When the last message arrives among ``ranks`` of the network."""
    router, chunk_bytes = Router(topology), size * schedule.chunk_fraction
    transfers, waits_for, unlocks = _dependencies(schedule)
    free: dict[Link, float] = defaultdict(float)
    ready_at = [0.0] * len(transfers)
    ready = [(0.0, number) for number, count in enumerate(waits_for) if not count]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        now, number = heapq.heappop(ready)
        one = transfers[number]
        route = router.route(ranks[one.src], ranks[one.dst])
        level = topology.levels[route.level]
        on_link = len(one.chunks) * chunk_bytes / level.rate
        for link in route.links:  # streams share a port: a message that waits for one link does not hold another
            free[link] = max(now, free[link]) + on_link
        arrived = max(free[link] for link in route.links) + route.hops * level.latency
        last = max(last, arrived)
        for later in unlocks[number]:
            ready_at[later] = max(ready_at[later], arrived)
            waits_for[later] -= 1
            if not waits_for[later]:
                heapq.heappush(ready, (ready_at[later], later))
    return last


def _dependencies(schedule: Schedule) -> tuple[list[Transfer], list[int], list[list[int]]]:
    """All transfers in the order of their rounds, how many each waits for, and whom its arrival unlocks.

    A message waits for the newest arrivals of its chunks at its sender, and to a sum for one more at the same place.
    """
    transfers: list[Transfer] = []
    waits_for: list[int] = []
    unlocks: list[list[int]] = []
    newest: dict[tuple[int, int], set[int]] = {}  # what arrived last of a chunk at a rank
    for one in schedule.rounds:
        arrivals: dict[tuple[int, int], set[int]] = {}
        for transfer in one:
            number = len(transfers)
            before = set().union(*(newest.get((transfer.src, chunk), set()) for chunk in transfer.chunks))
            for earlier in before:
                unlocks[earlier].append(number)
            transfers.append(transfer)
            waits_for.append(len(before))
            unlocks.append([])
            for chunk in transfer.chunks:
                arrivals.setdefault((transfer.dst, chunk), set()).add(number)
        for place, numbers in arrivals.items():
            summed = any(transfers[number].reduce for number in numbers)
            newest[place] = numbers | newest.get(place, set()) if summed else numbers
    return transfers, waits_for, unlocks
