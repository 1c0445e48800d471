"""Collectives over several levels: one level after the other, or flat across all of them.

All-gather goes outermost level first, each device with its own share, so that the fast inner level carries
what the slow outer one did not have to; reduce-scatter is the mirror image and all-reduce is both. Broadcast
goes from leaders down; gather runs along the rails (devices of equal index) before it enters the root's
group; all-to-all exchanges along every level in turn. Levels here all have at least two members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.collectives.arrays import maximum
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.table import EXACT, Row, choose, default_row, rows_for_level_of_hierarchy
from shardwise.collectives.topology import Level, Topology
from shardwise.collectives.work import CollectiveCost, Work, settle
from shardwise.spec.errors import SpecError

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size

_FROM_LEADERS = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
_TO_OR_FROM_ROOT = (CollectiveKind.GATHER, CollectiveKind.SCATTER)
_WHOLE_BUFFER = (*_FROM_LEADERS, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True)
class Stage:
    """One level's turn. ``level`` has the bandwidth one device gets while the others use their share.

    ``size_fraction`` of the collective's size is each group's buffer; ``groups`` groups work at once;
    ``sharing`` devices are on the busiest port.
    """

    index: int
    level: Level
    row: Row
    size_fraction: float
    groups: int
    sharing: int

    def work(self, kind: CollectiveKind, size: Size) -> Work:
        work = self.row.algorithm.work(kind, self.level, size * self.size_fraction)
        return replace(work, bytes=work.bytes * self.sharing, total_bytes=work.total_bytes * self.groups)


def stages(kind: CollectiveKind, topology: Topology, names: Sequence[str] = ()) -> list[Stage]:
    """The turns of all levels, innermost first, with the named algorithms or the textbook's."""
    levels = topology.levels
    if names and len(names) != len(levels):
        raise SpecError("algorithm", f"{len(names)} algorithms for {len(levels)} levels", "name one per level")
    made = []
    for index, level in enumerate(levels):
        outermost = index == len(levels) - 1
        if names:
            rows = rows_for_level_of_hierarchy(kind, level, outermost)
            row = choose(rows, names[index], kind, f"{level.shape.name} level of a hierarchy")
        else:
            row = default_row(kind, level, outermost)
        made.append(stage(kind, topology, index, row))
    return made


def stage(kind: CollectiveKind, topology: Topology, index: int, row: Row) -> Stage:
    level, below = topology.levels[index], topology.below(index)
    above = topology.size // (below * level.size)
    sharing = 1 if kind in _FROM_LEADERS else topology.sharing(index)
    groups = above if kind in _FROM_LEADERS else below if kind in _TO_OR_FROM_ROOT else above * below
    fraction = 1.0 if kind in _WHOLE_BUFFER else 1 / below
    own = replace(level, bandwidth=level.bandwidth / sharing, ports=None) if sharing > 1 else level
    return Stage(index, own, row, fraction, groups, sharing)


def hierarchical_cost(
    kind: CollectiveKind, size: Size, topology: Topology, names: Sequence[str] = (), overlapped: bool = False
) -> CollectiveCost:
    """The sum over the levels; ``overlapped``: the slowest level's bandwidth hides the others' (a lower bound)."""
    turns = stages(kind, topology, names)
    used = {turn.index: turn.work(kind, size) for turn in turns}
    volume = Work()
    for work in used.values():
        volume = _then(kind, volume, work)
    name = "hierarchical_pipelined" if overlapped else "hierarchical"
    if names:
        name += f"({','.join(names)})"
    exact = not overlapped and all(turn.row.bound == EXACT for turn in turns)
    return settle(topology, used, volume, name, exact, overlapped)


def _then(kind: CollectiveKind, first: Work, second: Work) -> Work:
    """Volumes of two levels' turns. The root is busiest on every level, but on its side of the traffic only."""
    both = first + second
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.SCATTER):
        return replace(both, received_bytes=maximum(first.received_bytes, second.received_bytes))
    if kind in (CollectiveKind.REDUCE, CollectiveKind.GATHER):
        return replace(both, sent_bytes=maximum(first.sent_bytes, second.sent_bytes))
    return both


def flat_ring_cost(kind: CollectiveKind, size: Size, topology: Topology) -> CollectiveCost:
    """One ring through all devices in rank order: (n-1)(max a + m/n max b), all-reduce twice."""
    n, passes = topology.size, 2 if kind is CollectiveKind.ALL_REDUCE else 1
    rounds = passes * (n - 1)
    loads = [level.shape.next_load for level in topology.levels]
    sent = rounds * size / n
    volume = Work(steps=rounds, sent_bytes=sent, received_bytes=sent, total_bytes=n * sent)
    used = _slowest(topology, ring_hops(topology), loads, rounds, size / n)
    return settle(topology, used, volume, "flat_ring", exact=True)


def ring_hops(topology: Topology) -> list[int]:
    """Of a step to the next rank, on every level; the ring closes on the outermost."""
    *inner, last = (level.shape for level in topology.levels)
    return [*(shape.next_hops for shape in inner), max(last.next_hops, last.closing_hops)]


def parallel_rings_cost(kind: CollectiveKind, size: Size, topology: Topology) -> CollectiveCost:
    """As many rings through all devices as a node has, each leaving it by another device, as NCCL builds them.

    A chunk still passes every device, one after the other (the latencies of n-1 hops), but each network port carries
    1/g of the bytes; the rings keep all levels busy at once.
    """
    n, passes = topology.size, 2 if kind is CollectiveKind.ALL_REDUCE else 1
    sent = passes * (n - 1) / n * size
    used: dict[int, Work] = {}
    inside = 1  # devices below one member of the level
    for index, level in enumerate(topology.levels):
        outside = n // (inside * level.size)
        crossings = outside * (level.size - 1) if index < len(topology.levels) - 1 else level.size - 1
        share = (level.size - 1) / level.size if index < len(topology.levels) - 1 else 1.0
        hops = passes * crossings * level.shape.step_hops
        carried = sent / inside * share * topology.sharing(index) * level.shape.step_load / level.shape.disjoint_rings
        used[index] = Work(hops=hops, bytes=carried)
        inside *= level.size
    volume = Work(steps=passes * (n - 1), sent_bytes=sent, received_bytes=sent, total_bytes=n * sent)
    return settle(topology, used, volume, "parallel_rings", exact=False, overlapped=True)


def flat_direct_cost(kind: CollectiveKind, size: Size, topology: Topology) -> CollectiveCost:
    """Everything in one round over every level's links at once: send_recv to the next rank, or all-to-all."""
    n = topology.size
    alone = kind is CollectiveKind.SEND_RECV
    sent = size if alone else (n - 1) / n * size
    volume = Work(steps=1, sent_bytes=sent, received_bytes=sent, total_bytes=(n - 1) * size)
    used = _slowest(topology, *direct_loads(kind, topology), 1, size if alone else size / n)
    return settle(topology, used, volume, "direct", exact=True)


def direct_loads(kind: CollectiveKind, topology: Topology) -> tuple[list[int], list[int]]:
    """Hops of the longest route and blocks over the busiest link, on every level."""
    shapes = [level.shape for level in topology.levels]
    if kind is CollectiveKind.SEND_RECV:
        return [s.next_hops for s in shapes], [s.next_load for s in shapes]
    loads = [s.exchange_load * topology.below(i) * topology.sharing(i) for i, s in enumerate(shapes)]
    return [s.farthest_hops for s in shapes], loads


def _slowest(topology: Topology, hops: list[int], loads: list[int], rounds: int, block: Size) -> dict[int, Work]:
    """Every level is used, but rounds wait for the longest latency and the slowest link only (outermost of equals)."""
    levels = topology.levels
    late = max(range(len(levels)), key=lambda i: (hops[i] * levels[i].latency, i))
    slow = max(range(len(levels)), key=lambda i: (loads[i] / levels[i].rate, i))
    moved = [rounds * load * block for load in loads]
    return {
        i: Work(rounds * hops[i] if i == late else 0, moved[i] if i == slow else 0, beside=0 if i == slow else moved[i])
        for i in range(len(levels))
    }
