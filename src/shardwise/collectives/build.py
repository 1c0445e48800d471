"""Schedules by name, for one level or for several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.collectives.algorithms.pairwise import direct_schedule
from shardwise.collectives.algorithms.rings import ring_build
from shardwise.collectives.arrays import checked_size
from shardwise.collectives.cost import (
    family,
    hierarchical_cost,
    parse_composite,
    stages,
    textbook_name,
    without_unit_levels,
)
from shardwise.collectives.schedule import CollectiveKind, Schedule, Transfer, embed, schedule_of, side_by_side
from shardwise.collectives.shapes import Switch
from shardwise.collectives.table import LEVELS_ROWS, choose, rows_for
from shardwise.collectives.topology import Level, Topology
from shardwise.collectives.work import Algorithm
from shardwise.spec.errors import SpecError, shown

# -- Schedules over several levels, made of the levels' own schedules --------------------------------
# On a level with ``below`` devices per member and ``size`` members, rank r is member r // below % size of the group
# (above, rail) = (r // (below*size), r % below). While a level has its turn, all its groups run at once.

BuildLevel = Callable[[int, CollectiveKind], Schedule]
Rounds = list[list[Transfer]]


@dataclass(frozen=True)
class _Place:
    """A level's position in the hierarchy."""

    below: int
    size: int
    above: int

    def ranks(self, above: int, rail: int) -> list[int]:
        return [rail + self.below * (member + self.size * above) for member in range(self.size)]

    def held(self, member: int, rail: int, split: int) -> list[int]:
        """Chunks that a member holds before its level's turn: those of its rail, over all levels above."""
        ranks = (rail + self.below * (member + self.size * above) for above in range(self.above))
        return [rank * split + part for rank in ranks for part in range(split)]


def _places(topology: Topology) -> list[_Place]:
    sizes = [(topology.below(index), level.size) for index, level in enumerate(topology.levels)]
    return [_Place(below, size, topology.size // (below * size)) for below, size in sizes]


def _cut(chunks: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """``chunks`` in ``parts`` equal runs."""
    length, rest = divmod(len(chunks), parts)
    assert rest == 0
    return [tuple(chunks[i * length : (i + 1) * length]) for i in range(parts)]


def nest(kind: CollectiveKind, topology: Topology, build: BuildLevel, name: str) -> Schedule:
    """The levels' schedules, ``build(level index, kind)``, as one schedule for all devices."""
    match kind:
        case CollectiveKind.BROADCAST | CollectiveKind.REDUCE:
            return _from_leaders(kind, topology, build, name)
        case CollectiveKind.ALL_TO_ALL:
            return _exchange(topology, build, name)
        case CollectiveKind.ALL_REDUCE:
            return _all_reduce(topology, build, name)
    return _blockwise(kind, topology, build, name)


def _blockwise(kind: CollectiveKind, topology: Topology, build: BuildLevel, name: str) -> Schedule:
    """Gathers go outermost level first, scatters innermost first; with a root only its groups take part."""
    places = _places(topology)
    parts = [build(index, kind) for index in range(len(places))]
    split = math.lcm(*(part.chunk_count // part.n for part in parts))
    order = range(len(places))
    outer_first = kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
    only_root = kind in (CollectiveKind.GATHER, CollectiveKind.SCATTER)
    rounds: Rounds = []
    for index in reversed(order) if outer_first else order:
        rounds += _block_turn(places[index], parts[index], split, only_root)
    return schedule_of(kind, topology.size, topology.size * split, rounds, name)


def _block_turn(place: _Place, part: Schedule, split: int, only_root: bool) -> Rounds:
    per_member = part.chunk_count // part.n

    def groups() -> Iterable[Rounds]:
        for rail in range(place.below):
            pieces = [_cut(place.held(member, rail, split), per_member) for member in range(place.size)]
            chunks = dict(enumerate(piece for member in pieces for piece in member))
            for above in range(1 if only_root else place.above):
                yield embed(part.rounds, place.ranks(above, rail), chunks)

    return side_by_side(groups())


def _all_reduce(topology: Topology, build: BuildLevel, name: str) -> Schedule:
    """Reduce-scatter inside, all-reduce of the shares across the outermost level, all-gather inside."""
    places = _places(topology)
    last = len(places) - 1
    scatters = [build(index, CollectiveKind.REDUCE_SCATTER) for index in range(last)]
    gathers = [build(index, CollectiveKind.ALL_GATHER) for index in range(last)]
    across = build(last, CollectiveKind.ALL_REDUCE)
    needed = across.chunk_count // math.gcd(across.chunk_count, across.n)
    split = math.lcm(needed, *(part.chunk_count // part.n for part in scatters))
    rounds: Rounds = []
    for place, part in zip(places, scatters):
        rounds += _block_turn(place, part, split, only_root=False)
    outer, shares = places[last], []
    for rail in range(outer.below):
        held = [chunk for member in range(outer.size) for chunk in outer.held(member, rail, split)]
        chunks = dict(enumerate(_cut(held, across.chunk_count)))
        shares.append(embed(across.rounds, outer.ranks(0, rail), chunks))
    rounds += side_by_side(shares)
    for place, part in reversed(list(zip(places, gathers))):
        rounds += _block_turn(place, part, split, only_root=False)
    return schedule_of(CollectiveKind.ALL_REDUCE, topology.size, topology.size * split, rounds, name)


def _from_leaders(kind: CollectiveKind, topology: Topology, build: BuildLevel, name: str) -> Schedule:
    """Broadcast from the outermost level's leaders inwards; reduce the other way."""
    places = _places(topology)
    parts = [build(index, kind) for index in range(len(places))]
    count = math.lcm(*(part.chunk_count for part in parts))
    turns = []
    for place, part in zip(places, parts):
        chunks = dict(enumerate(_cut(range(count), part.chunk_count)))
        groups = [embed(part.rounds, place.ranks(above, 0), chunks) for above in range(place.above)]
        turns.append(side_by_side(groups))
    if kind is CollectiveKind.BROADCAST:
        turns.reverse()
    return schedule_of(kind, topology.size, count, [transfers for turn in turns for transfers in turn], name)


def _exchange(topology: Topology, build: BuildLevel, name: str) -> Schedule:
    """All-to-all along every level in turn: blocks for member j of this level move to it, whatever their final rank."""
    places, n = _places(topology), topology.size
    rounds: Rounds = []
    for index, place in enumerate(places):
        part = build(index, CollectiveKind.ALL_TO_ALL)
        assert part.chunk_count == place.size**2
        groups = []
        for above in range(place.above):
            for rail in range(place.below):
                blocks = _exchanged(place, above, rail, n)
                groups.append(embed(part.rounds, place.ranks(above, rail), blocks))
        rounds += side_by_side(groups)
    return schedule_of(CollectiveKind.ALL_TO_ALL, n, n * n, rounds, name)


def _exchanged(place: _Place, above: int, rail: int, n: int) -> dict[int, tuple[int, ...]]:
    """The blocks in each pair's message; on the levels below they are already in place."""
    blocks = {}
    for i in range(place.size):
        sources = [low + place.below * (i + place.size * above) for low in range(place.below)]
        for j in range(place.size):
            targets = [rail + place.below * (j + place.size * high) for high in range(place.above)]
            blocks[i * place.size + j] = tuple(src * n + dst for src in sources for dst in targets)
    return blocks


def pipelined(schedule: Schedule, pieces: int) -> Schedule:
    """The schedule with every chunk cut into ``pieces``; piece p runs p rounds after piece 0, to overlap levels."""
    if pieces == 1:
        return schedule

    def of_piece(piece: int) -> list[list[Transfer]]:
        waiting: Rounds = [[] for _ in range(piece)]
        return waiting + [
            [replace(t, chunks=tuple(chunk * pieces + piece for chunk in t.chunks)) for t in transfers]
            for transfers in schedule.rounds
        ]

    rounds = side_by_side([of_piece(piece) for piece in range(pieces)])
    return replace(
        schedule,
        chunk_count=schedule.chunk_count * pieces,
        chunk_fraction=schedule.chunk_fraction / pieces,
        rounds=tuple(map(tuple, rounds)),
    )


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
        raise SpecError(
            "algorithm", f"{algorithm.name} has a price but no schedule", "choose another one to look at its messages"
        )
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
    """The best number of pieces of a pipeline over the levels: k pieces divide the exposed time by k, and each adds the
    latency of a round."""
    if size is None:
        return DEFAULT_CHUNKS
    in_turn = hierarchical_cost(kind, size, topology, per_level)
    hidden = in_turn.bandwidth_seconds - hierarchical_cost(kind, size, topology, per_level, True).bandwidth_seconds
    latency = max(level.latency for level in topology.levels)
    return max(1, round(math.sqrt(min(hidden, latency * MOST_PIECES**2) / latency))) if latency else MOST_PIECES
