"""The price of a collective, without building its schedule: the same few operations for 8 devices or 16384."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives.arrays import checked_size, is_array, maximum, minimum
from shardwise.collectives.schedule import CollectiveKind
from shardwise.collectives.shapes import Switch
from shardwise.collectives.table import (
    EXACT,
    LEVELS_ROWS,
    ROWS,
    Row,
    choose,
    default_row,
    rows_for,
    rows_for_level_of_hierarchy,
)
from shardwise.collectives.topology import Level, Topology, offered, runs_levels_in_turn
from shardwise.collectives.work import COST_FIGURES, CollectiveCost, Work, level_cost, settle
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.network import Link

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


_COMPOSITE = re.compile(r"(hierarchical|hierarchical_pipelined)(?:\(([\w, ]+)\))?")


def collective_cost(
    kind: str | CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str = "textbook"
) -> CollectiveCost:
    """Time and traffic of one collective among all devices of ``topology``.

    ``size_bytes`` is a number, text ("64MiB") or an array; see CollectiveKind for what it counts.
    ``algorithm`` is a name from ``pairs()``, "textbook", "auto" (the cheapest for each size), or for several
    levels "hierarchical(inner, ..., outer)" with one algorithm per level.
    """
    kind, size = CollectiveKind.parse(kind), checked_size(size_bytes)
    slim, kept = without_unit_levels(topology)
    if algorithm == "auto":
        cost = _cheapest(kind, size, slim)
    else:
        cost = _named(kind, size, slim, textbook_name(kind, slim) if algorithm == "textbook" else algorithm)
    if len(kept) == len(topology.levels):
        return cost
    unused = [level_cost(i, level, None) for i, level in enumerate(topology.levels)]
    for index, level in zip(kept, cost.levels):
        unused[index] = replace(level, level_index=index, level_name=unused[index].level_name)
    return replace(cost, levels=tuple(unused))


def without_unit_levels(topology: Topology) -> tuple[Topology, list[int]]:
    """The topology without levels that have a single member, and the indices of those that stay."""
    kept = [i for i, level in enumerate(topology.levels) if level.size > 1]
    if len(kept) == len(topology.levels):
        return topology, kept
    return replace(topology, levels=tuple(topology.levels[i] for i in kept)), kept


def algorithm_names(kind: CollectiveKind, topology: Topology) -> list[str]:
    """The algorithms for ``kind`` on ``topology``, textbook first."""
    slim, _ = without_unit_levels(topology)
    if len(slim.levels) == 1:
        return [row.name for row in rows_for(kind, slim.levels[0])]
    if not slim.levels:
        return ["none"]
    return [row.name for row in LEVELS_ROWS if kind in row.kinds]


def textbook_name(kind: CollectiveKind, topology: Topology) -> str:
    return algorithm_names(kind, topology)[0]


def _named(kind: CollectiveKind, size: Size, topology: Topology, algorithm: str) -> CollectiveCost:
    if not topology.levels:
        zero = 0.0 * size
        return CollectiveCost(zero, zero, 0, zero, zero, zero, algorithm, exact=True)
    if len(topology.levels) == 1:
        level = topology.levels[0]
        row = choose(rows_for(kind, level), algorithm, kind, level.shape.name)
        work = row.algorithm.work(kind, level, size)
        return settle(topology, {0: work}, work, row.name, row.bound == EXACT)
    names = algorithm_names(kind, topology)
    composite = parse_composite(algorithm)
    if composite is not None and "hierarchical" in names:
        overlapped = algorithm.startswith("hierarchical_pipelined")
        return hierarchical_cost(kind, size, topology, composite, overlapped)
    if algorithm not in names:
        remedy = nearest_name(algorithm, names) or "choose one of " + ", ".join(names)
        raise SpecError("algorithm", f"{shown(algorithm)} cannot run {kind} on several levels", remedy)
    flat = {"flat_ring": flat_ring_cost, "parallel_rings": parallel_rings_cost, "direct": flat_direct_cost}
    return flat[algorithm](kind, size, topology)


def check_algorithm(algorithm: str, field: str = "algorithm") -> None:
    """Raises SpecError unless some collective on some network has ``algorithm``."""
    known = {"auto", "textbook", *(row.name for row in ROWS), *(row.name for row in LEVELS_ROWS)}
    for part in parse_composite(algorithm) or [family(algorithm)]:
        if part not in known:
            remedy = nearest_name(part, known) or "`shardwise list collectives` shows all"
            raise SpecError(field, f"{shown(algorithm)} is not an algorithm", remedy)


def family(algorithm: str) -> str:
    """The name without the algorithms of its levels: "hierarchical" of "hierarchical(ring, bruck)"."""
    return algorithm.partition("(")[0]


def parse_composite(algorithm: str) -> list[str] | None:
    """[] for "hierarchical", the levels' algorithms for "hierarchical(ring, bruck)", None for other names."""
    match = _COMPOSITE.fullmatch(algorithm)
    if match is None:
        return None
    return [part.strip() for part in match.group(2).split(",")] if match.group(2) else []


def _cheapest(kind: CollectiveKind, size: Size, topology: Topology) -> CollectiveCost:
    options = _options(kind, size, topology)
    costs = [_named(kind, size, topology, name) for name, _ in options]
    if not is_array(size):
        return min(costs, key=lambda cost: float(cost.seconds))
    return cheapest_where(costs, [where for _, where in options]) if len(costs) > 1 else costs[0]


def candidates(kind: CollectiveKind, size: Size, topology: Topology) -> list[str]:
    """Names of algorithms that include the cheapest for every size; lower bounds only if ``pipelined_levels``."""
    return [name for name, _ in _options(kind, size, topology)]


def _options(kind: CollectiveKind, size: Size, topology: Topology) -> list[tuple[str, Any]]:
    """The candidates, each with a mask of the sizes that it is one for, so that each size is priced as if alone."""
    names = algorithm_names(kind, topology)
    if len(topology.levels) < 2 or kind is CollectiveKind.SEND_RECV:
        return [(name, True) for name in offered(topology.library, kind, names, str)]
    if not runs_levels_in_turn(topology.library, kind):
        flat = [name for name in names if not name.startswith("hierarchical")] or names
        return [(name, True) for name in offered(topology.library, kind, flat, str)]
    if topology.library != "any":
        options = [(name, True) for name in names if name == "parallel_rings"]
        if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
            return options
    else:
        models = ("parallel_rings",) if topology.pipelined_levels else ("parallel_rings", "hierarchical_pipelined")
        options = [(name, True) for name in names if name not in models]
    best = [_best_on_level(kind, size, topology, index) for index in range(len(topology.levels))]
    for choice, where in _combinations(best):
        options.append((f"hierarchical({','.join(choice)})", where))
        if topology.pipelined_levels:
            options.append((f"hierarchical_pipelined({','.join(choice)})", where))
    return options


def _best_on_level(kind: CollectiveKind, size: Size, topology: Topology, index: int) -> Any:
    """The cheapest algorithm's name on one level; for an array of sizes, an array of names."""
    rows = rows_for_level_of_hierarchy(kind, topology.levels[index], index == len(topology.levels) - 1)
    rows = offered(topology.library, kind, rows, lambda row: row.name)
    seconds = []
    for row in rows:
        priced = level_cost(index, topology.levels[index], stage(kind, topology, index, row).work(kind, size))
        seconds.append(priced.latency_seconds + priced.bandwidth_seconds)
    if not is_array(size):
        return rows[min(range(len(rows)), key=lambda i: float(seconds[i]))].name
    import numpy as np

    stacked = np.stack([np.broadcast_to(s, np.shape(size)) for s in seconds])
    return np.array([row.name for row in rows])[stacked.argmin(axis=0)]


def _combinations(best: Sequence[Any]) -> list[tuple[tuple[str, ...], Any]]:
    """The distinct choices of one algorithm per level, each with a mask of the sizes that made it."""
    if isinstance(best[0], str):
        return [(tuple(best), True)]
    import numpy as np

    choices = sorted({tuple(str(name) for name in names) for names in zip(*(b.ravel() for b in best))})
    return [(choice, np.all([b == name for b, name in zip(best, choice)], axis=0)) for choice in choices]


def cheapest_where(costs: list[CollectiveCost], wheres: list[Any]) -> CollectiveCost:
    """The cheapest for each size of an array; ``algorithm`` joins the names of all that were chosen."""
    import numpy as np

    seconds = np.stack([np.where(where, cost.seconds, np.inf) for cost, where in zip(costs, wheres)])
    winner = seconds.argmin(axis=0)

    def pick(values: Sequence[Any]) -> Any:
        return np.choose(winner, values)

    per_level = ("hops", "bytes", "latency_seconds", "bandwidth_seconds", "busy_seconds")
    levels = tuple(
        replace(level, **{name: pick([getattr(cost.levels[i], name) for cost in costs]) for name in per_level})
        for i, level in enumerate(costs[0].levels)
    )
    chosen = [costs[i] for i in np.unique(winner)]
    return replace(
        costs[0],
        **{name: pick([getattr(cost, name) for cost in costs]) for name in COST_FIGURES},
        algorithm="|".join(dict.fromkeys(cost.algorithm for cost in chosen)),
        exact=all(cost.exact for cost in chosen),
        levels=levels,
    )


@dataclass(frozen=True)
class Volume:
    """Bytes the busiest rank sends and receives, and bytes of all ranks."""

    sent_bytes: Size
    received_bytes: Size
    total_bytes: Size


@dataclass(frozen=True)
class LatencyAndVolume:
    """The time and traffic of a collective."""

    latency: Size  # the whole time in seconds, bandwidth included
    volume: Volume
    steps: Size  # rounds one after the other
    algorithm: str


def collective_latency_and_volume(
    kind: str | CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str = "textbook"
) -> LatencyAndVolume:
    """Seconds, bytes and rounds of one collective; the arguments are those of ``collective_cost``."""
    cost = collective_cost(kind, size_bytes, topology, algorithm)
    volume = Volume(cost.sent_bytes, cost.received_bytes, cost.total_bytes)
    return LatencyAndVolume(cost.seconds, volume, cost.steps, cost.algorithm)


def p2p_latency(size_bytes: Any, link: Level | Link) -> LatencyAndVolume:
    """latency + size / reached bandwidth of one message over ``link`` (from the catalogue, or a Level)."""
    size = checked_size(size_bytes)
    level = (
        link if isinstance(link, Level) else Level(Switch(2), link.bandwidth, link.latency, efficiency=link.efficiency)
    )
    cost = level_cost(0, level, Work(hops=1, bytes=size))
    seconds = cost.latency_seconds + cost.bandwidth_seconds
    return LatencyAndVolume(seconds, Volume(size, size, size), 1, "direct")


_SCAN = [2.0 ** (step / 2) for step in range(81)]  # 1 byte .. 1 TiB
_CLOSE = 1 + 1e-6


def crossovers(
    kind: str | CollectiveKind, topology: Topology, algorithms: Sequence[str] | None = None
) -> list[tuple[float, str, str]]:
    """(size_bytes, from, to) wherever the cheapest of ``algorithms`` (default: all that "auto" considers) changes.

    As NCCL's tuner finds them (src/graph/tuning.cc). Of algorithms that cost the same the first is taken.
    """
    kind = CollectiveKind.parse(kind)
    slim, _ = without_unit_levels(topology)
    if not slim.levels:
        return []
    if algorithms is not None and not algorithms:
        raise SpecError("algorithms", "no algorithm to compare", "name at least two, or leave it out")
    names = algorithms or list(dict.fromkeys(name for size in _SCAN for name in candidates(kind, size, slim)))

    def cheapest(size: float) -> str:
        best, least = names[0], math.inf
        for name in names:
            seconds = float(collective_cost(kind, size, slim, name).seconds)
            if seconds < least * (1 - 1e-9):
                best, least = name, seconds
        return best

    changes: list[tuple[float, str, str]] = []

    def search(low: float, first: str, high: float, last: str) -> None:
        """Halve the gap (on a logarithmic scale) until it is closed."""
        if first == last:
            return
        if high / low < _CLOSE:
            changes.append((high, first, last))
            return
        middle = math.sqrt(low * high)
        between = cheapest(middle)
        search(low, first, middle, between)
        search(middle, between, high, last)

    winners = [cheapest(size) for size in _SCAN]
    for low, first, high, last in zip(_SCAN, winners, _SCAN[1:], winners[1:]):
        search(low, first, high, last)
    return changes


# -- several levels: one after the other, or flat across all of them ---------------------------------
# All-gather goes outermost level first, each device with its own share, so that the fast inner level carries what the
# slow outer one did not have to; reduce-scatter is the mirror image and all-reduce is both. Broadcast goes from leaders
# down; gather runs along the rails (devices of equal index) before it enters the root's group; all-to-all exchanges
# along every level in turn. Levels here all have at least two members.

_FROM_LEADERS = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
_TO_OR_FROM_ROOT = (CollectiveKind.GATHER, CollectiveKind.SCATTER)
_WHOLE_BUFFER = (*_FROM_LEADERS, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True)
class Stage:
    """One level's turn in a hierarchical collective."""

    index: int
    level: Level  # with the bandwidth that a device gets while others use their share of its port
    row: Row
    size_fraction: float  # the buffer of a group, as a share of the collective's size
    groups: int  # that work at once
    sharing: int  # devices on the busiest port

    def work(self, kind: CollectiveKind, size: Size) -> Work:
        work = self.row.algorithm.work(kind, self.level, size * self.size_fraction)
        return replace(work, bytes=work.bytes * self.sharing, total_bytes=work.total_bytes * self.groups)


def stages(kind: CollectiveKind, topology: Topology, names: Sequence[str] = ()) -> list[Stage]:
    """The turns of all levels, innermost first, with the algorithms ``names`` or those of the textbook."""
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
    """The sum over the levels; with ``overlapped``, a lower bound, only the bandwidth of the slowest level counts."""
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
    """The volume of two turns. A root is the busiest rank on every level, but only in the direction it leads."""
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
    """Hops of a step to the next rank, on every level; on the outermost the ring also closes."""
    *inner, last = (level.shape for level in topology.levels)
    return [*(shape.next_hops for shape in inner), max(last.next_hops, last.closing_hops)]


def parallel_rings_cost(kind: CollectiveKind, size: Size, topology: Topology) -> CollectiveCost:
    """As many rings through all devices as a node has devices, each leaving the node by another one, as in NCCL.

    A chunk still passes every device in turn, with the latencies of n-1 hops; but each network port carries only its
    share of the bytes, and the rings keep all levels busy at once.
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
    cost = settle(topology, used, volume, "parallel_rings", exact=False, overlapped=True)
    return _by_protocol(cost, topology.levels)


SMALL_MESSAGES = 20.4e9
"""Bytes/s of a rank under NCCL's protocol LL between more than two nodes (src/graph/tuning.cc, llMaxBws)."""


def _by_protocol(cost: CollectiveCost, levels: Sequence[Level]) -> CollectiveCost:
    """Rings of NCCL by its cheaper protocol, as its tuner chooses.

    LL sends a flag with every word: a step takes a level's latency, at half the bandwidth and `SMALL_MESSAGES` at most.
    Simple synchronises sender and receiver: full bandwidth, and a step takes ``ring_step``.
    """
    longer = [part.hops * max(0.0, level.ring_step - level.latency) for part, level in zip(cost.levels, levels)]
    waits = sum(longer)
    if not waits:
        return cost
    moving = cost.bandwidth_seconds
    by_flags = maximum(moving, cost.sent_bytes / SMALL_MESSAGES - moving)
    added = minimum(waits, by_flags)
    parts = zip(cost.levels, longer)
    own = tuple(replace(part, latency_seconds=part.latency_seconds + added * (late / waits)) for part, late in parts)
    return replace(cost, latency_seconds=cost.latency_seconds + added, levels=own)


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
    """The work of every level: rounds wait only for the longest latency and the slowest link (outermost of equals)."""
    levels = topology.levels
    late = max(range(len(levels)), key=lambda i: (hops[i] * levels[i].latency, i))
    slow = max(range(len(levels)), key=lambda i: (loads[i] / levels[i].rate, i))
    moved = [rounds * load * block for load in loads]
    return {
        i: Work(rounds * hops[i] if i == late else 0, moved[i] if i == slow else 0, beside=0 if i == slow else moved[i])
        for i in range(len(levels))
    }
