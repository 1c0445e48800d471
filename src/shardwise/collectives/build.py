"""Schedules by name, for one level or for several."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shardwise.collectives.algorithms.base import Algorithm
from shardwise.collectives.algorithms.direct import direct_schedule
from shardwise.collectives.algorithms.ring import ring_build
from shardwise.collectives.arrays import checked_size
from shardwise.collectives.cost import family, parse_composite, textbook_name, without_unit_levels
from shardwise.collectives.hierarchy import hierarchical_cost, stages
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.nesting import nest
from shardwise.collectives.pipelining import pipelined
from shardwise.collectives.schedule import Schedule, schedule_of
from shardwise.collectives.shapes import Switch
from shardwise.collectives.table import LEVELS_ROWS, choose, rows_for
from shardwise.collectives.topology import Level, Topology
from shardwise.spec.errors import SpecError, shown

DEFAULT_CHUNKS = 4
MOST_PIECES = 16


def build_schedule(
    kind: str | CollectiveKind,
    topology: Topology,
    algorithm: str = "textbook",
    size_bytes: Any = None,
    chunks: int | None = None,
) -> Schedule:
    """The rounds of ``algorithm`` among all devices of ``topology``.

    Pipelined algorithms are cut into ``chunks``, or into the best number for ``size_bytes`` (the one that
    ``collective_cost`` assumes), or into 4.
    """
    kind = CollectiveKind.parse(kind)
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise SpecError("chunks", f"{shown(chunks)} is not a count of chunks", "give 1 or more")
    size = None if size_bytes is None else checked_size(size_bytes)
    slim, _ = without_unit_levels(topology)
    name = textbook_name(kind, slim) if algorithm == "textbook" else algorithm
    if not slim.levels:
        return schedule_of(kind, 1, 1, [], name)
    if len(slim.levels) == 1:
        (level,) = slim.levels
        row = choose(rows_for(kind, level), name, kind, level.shape.name)
        return _on_level(row.algorithm, kind, level, size, chunks)
    return _on_levels(kind, slim, name, size, chunks)


def require_schedule(kind: CollectiveKind, topology: Topology, algorithm: str) -> None:
    """Raises SpecError if ``algorithm`` has no schedule for ``kind`` among the devices of ``topology``."""
    slim, _ = without_unit_levels(topology)
    if len(slim.levels) == 1:
        (level,) = slim.levels
        rows = [row for row in rows_for(kind, level) if row.algorithm.build is not None]
        choose(rows, algorithm, kind, level.shape.name)
    elif slim.levels:
        per_level = parse_composite(algorithm)
        if family(algorithm) not in _built(kind):
            raise _unbuilt(kind, algorithm)
        if per_level is not None:
            stages(kind, slim, per_level)


def _built(kind: CollectiveKind) -> list[str]:
    return [row.name for row in LEVELS_ROWS if kind in row.kinds and row.built]


def _unbuilt(kind: CollectiveKind, name: str) -> SpecError:
    problem = f"{shown(name)} has no schedule for {kind} on several levels"
    return SpecError("algorithm", problem, "choose one of " + ", ".join(_built(kind)))


def _on_level(algorithm: Algorithm, kind: CollectiveKind, level: Level, size: Any, chunks: int | None) -> Schedule:
    if algorithm.build is None:
        raise SpecError("algorithm", f"{algorithm.name} runs inside the switch", "it has a cost but no schedule")
    count = chunks or DEFAULT_CHUNKS
    if chunks is None and size is not None and algorithm.chunks is not None:
        count = int(algorithm.chunks(kind, level, size))
    return algorithm.build(kind, level, count)


def _on_levels(kind: CollectiveKind, topology: Topology, name: str, size: Any, chunks: int | None) -> Schedule:
    names = _built(kind)
    per_level = parse_composite(name)
    overlapped = name.startswith("hierarchical_pipelined")
    if per_level is not None and family(name) in names:
        turns = stages(kind, topology, per_level)

        def build(index: int, part: CollectiveKind) -> Schedule:
            turn = turns[index]
            own = None if size is None else size * turn.size_fraction
            return _on_level(turn.row.algorithm, part, turn.level, own, None if overlapped else chunks)

        made = nest(kind, topology, build, name)
        return pipelined(made, chunks or _pieces(kind, topology, per_level, size)) if overlapped else made
    if name not in names:
        raise _unbuilt(kind, name)
    if name == "direct":
        return direct_schedule(kind, topology.size)
    ring = ring_build(kind, Level(Switch(topology.size), 1.0), 1)
    return replace(ring, algorithm="flat_ring")


def _pieces(kind: CollectiveKind, topology: Topology, per_level: list[str], size: Any) -> int:
    """Into how many pieces levels are cut that overlap: with k pieces the time that hides shrinks to 1/k, and every
    piece adds the latency of a round."""
    if size is None:
        return DEFAULT_CHUNKS
    in_turn = hierarchical_cost(kind, size, topology, per_level)
    hidden = in_turn.bandwidth_seconds - hierarchical_cost(kind, size, topology, per_level, True).bandwidth_seconds
    latency = max(level.latency for level in topology.levels)
    return max(1, round(math.sqrt(min(hidden, latency * MOST_PIECES**2) / latency))) if latency else MOST_PIECES
