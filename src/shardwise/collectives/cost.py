"""The price of a collective, without building its schedule: the same few operations for 8 devices or 16384."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collectives.arrays import checked_size, is_array
from shardwise.collectives.hierarchy import (
    flat_direct_cost,
    flat_ring_cost,
    hierarchical_cost,
    parallel_rings_cost,
    stage,
)
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.shapes import Switch
from shardwise.collectives.table import EXACT, LEVELS_ROWS, ROWS, choose, rows_for, rows_for_level_of_hierarchy
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
    """The topology less the levels with a single member, and the indices of those that stay."""
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
    return select(costs, [where for _, where in options]) if len(costs) > 1 else costs[0]


def candidates(kind: CollectiveKind, size: Size, topology: Topology) -> list[str]:
    """Names that include the cheapest for every size; lower bounds only where the user says they hold."""
    return [name for name, _ in _options(kind, size, topology)]


def _options(kind: CollectiveKind, size: Size, topology: Topology) -> list[tuple[str, Any]]:
    """The candidates, each with the sizes of an array that it is one for: an element is priced as if it were alone."""
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
    """The distinct choices of one algorithm per level, and which elements of an array made each."""
    if isinstance(best[0], str):
        return [(tuple(best), True)]
    import numpy as np

    choices = sorted({tuple(str(name) for name in names) for names in zip(*(b.ravel() for b in best))})
    return [(choice, np.all([b == name for b, name in zip(best, choice)], axis=0)) for choice in choices]


def select(costs: list[CollectiveCost], wheres: list[Any]) -> CollectiveCost:
    """The cheapest for each element; ``algorithm`` joins the names that were chosen anywhere."""
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
    """``latency`` is the whole time in seconds, ``steps`` the rounds one after the other."""

    latency: Size
    volume: Volume
    steps: Size
    algorithm: str


def collective_latency_and_volume(
    kind: str | CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str = "textbook"
) -> LatencyAndVolume:
    """Seconds, bytes and rounds of one collective; the arguments are those of ``collective_cost``."""
    cost = collective_cost(kind, size_bytes, topology, algorithm)
    volume = Volume(cost.sent_bytes, cost.received_bytes, cost.total_bytes)
    return LatencyAndVolume(cost.seconds, volume, cost.steps, cost.algorithm)


def p2p_latency(size_bytes: Any, link: Level | Link) -> LatencyAndVolume:
    """latency + size/bandwidth reached by one message over ``link`` (a catalogue link, a Level with its ramp, ...)."""
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

    NCCL's tuner finds the same (src/graph/tuning.cc). Of algorithms that cost the same, the one named first is kept.
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
