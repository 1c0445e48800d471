"""A schedule as one rank sees it: what it sends, receives and adds in every round, by elements of its tensors.

What is received lies where it has to end if nothing that is still needed is there; else, and before it is added, in
staging memory of its own, so that the receive can be posted before the first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.collectives.schedule import Round, Schedule, Transfer
from shardwise.engine.collectives.layout import STAGING, Layout, Region, joined, layout_of


@dataclass(frozen=True, slots=True)
class Send:
    """``number`` counts the messages of a pair of ranks. ``packed`` regions are copied into ``source`` first."""

    peer: int
    number: int
    source: Region
    packed: tuple[Region, ...] = ()

    @property
    def reads(self) -> tuple[Region, ...]:
        return self.packed or (self.source,)


@dataclass(frozen=True, slots=True)
class Receive:
    """``post_round``: before the sends of that round the region is free to be written."""

    peer: int
    number: int
    region: Region
    post_round: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Once ``receives`` are there, the sum of ``sources``, in order, goes to ``target`` (none: it is there)."""

    receives: tuple[Receive, ...]
    target: Region
    sources: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnRound:
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    target: Region
    source: Region


@dataclass(frozen=True)
class Program:
    """``copies`` are of what a rank gives itself; ``staging_elements`` is the staging memory it takes."""

    rounds: tuple[OwnRound, ...]
    copies: tuple[Copy, ...]
    staging_elements: int


def program_of(schedule: Schedule, rank: int, elements: int) -> Program:
    """What ``rank`` does; for ``elements`` see `layout_of`."""
    return _Translation(schedule, rank, layout_of(schedule, rank, elements)).program()


class _Translation:
    def __init__(self, schedule: Schedule, rank: int, layout: Layout) -> None:
        self.schedule, self.rank, self.layout = schedule, rank, layout
        self.place = dict(layout.first)
        self.staged = 0
        self.used: dict[int, int] = {}  # the last round in which a chunk's home was read or written
        self.messages: dict[tuple[int, int], int] = {}

    def program(self) -> Program:
        rounds = tuple(self._round(index, one) for index, one in enumerate(self.schedule.rounds))
        home, sizes = self.layout.home, self.layout.sizes
        away = [chunk for chunk in home if sizes[chunk] and self.place[chunk] != home[chunk]]
        copies = [(home[chunk], (self.place[chunk],)) for chunk in away]
        return Program(rounds, tuple(Copy(target, *sources) for target, sources in _together(copies)), self.staged)

    def _round(self, index: int, transfers: Round) -> OwnRound:
        sends: list[Send] = []
        receives: list[Receive] = []
        added: dict[int, list[tuple[Receive, Region]]] = {}
        moved: list[tuple[Receive, int, Region]] = []
        for t in transfers:
            chunks = self._chunks(t)
            if not chunks:
                continue
            number = self.messages.get((t.src, t.dst), 0)
            self.messages[t.src, t.dst] = number + 1
            if t.src == self.rank:
                sends.append(self._send(t.dst, number, chunks, index))
            elif t.dst == self.rank:
                receive, pieces = self._receive(t, number, chunks, index)
                receives.append(receive)
                for chunk, piece in zip(chunks, pieces):
                    if t.reduce:
                        added.setdefault(chunk, []).append((receive, piece))
                    else:
                        moved.append((receive, chunk, piece))
        arrivals = [*self._keep(moved, index), *self._add(added, index)]
        return OwnRound(tuple(sends), tuple(receives), tuple(arrivals))

    def _chunks(self, transfer: Transfer) -> list[int]:
        """Those that have elements, in the order in which they lie."""
        return sorted(filter(self.layout.sizes.__getitem__, transfer.chunks), key=self.layout.order.__getitem__)

    def _stage(self, elements: int) -> Region:
        self.staged += elements
        return Region(STAGING, self.staged - elements, self.staged)

    def _send(self, peer: int, number: int, chunks: list[int], index: int) -> Send:
        for chunk in chunks:
            self.used[chunk] = index
        runs = joined(self.place[chunk] for chunk in chunks)
        if len(runs) == 1:
            return Send(peer, number, runs[0])
        return Send(peer, number, self._stage(sum(run.elements for run in runs)), runs)

    def _receive(self, t: Transfer, number: int, chunks: list[int], index: int) -> tuple[Receive, list[Region]]:
        """Straight home unless something is added, the homes lie apart, or were in use just now."""
        homes = [self.layout.home.get(chunk) for chunk in chunks]
        settled = [home for home in homes if home is not None]
        last = max(self.used.get(chunk, -1) for chunk in chunks)
        if not t.reduce and len(settled) == len(homes) and len(joined(settled)) == 1 and last < index - 1:
            (home,) = joined(settled)
            return Receive(t.src, number, home, index - 1 if last >= 0 else 0), settled
        staged = self._stage(sum(self.layout.sizes[chunk] for chunk in chunks))
        pieces, start = [], staged.start
        for chunk in chunks:
            pieces.append(Region(STAGING, start, start + self.layout.sizes[chunk]))
            start = pieces[-1].stop
        return Receive(t.src, number, staged), pieces

    def _keep(self, moved: list[tuple[Receive, int, Region]], index: int) -> Iterable[Arrival]:
        by_receive: dict[Receive, list[tuple[Region, tuple[Region, ...]]]] = {}
        for receive, chunk, piece in moved:
            target = self.layout.home.get(chunk, piece)
            self.place[chunk] = target
            self.used[chunk] = index
            by_receive.setdefault(receive, []).append((target, () if target == piece else (piece,)))
        for receive, each in by_receive.items():
            for target, sources in _together(each):
                yield Arrival((receive,), target, sources)

    def _add(self, added: dict[int, list[tuple[Receive, Region]]], index: int) -> Iterable[Arrival]:
        by_receives: dict[tuple[Receive, ...], list[tuple[Region, tuple[Region, ...]]]] = {}
        for chunk, arrived in added.items():
            pieces = tuple(piece for _, piece in arrived)
            own = self.place.get(chunk)
            target = self.layout.home.get(chunk, pieces[0])
            self.place[chunk] = target
            self.used[chunk] = index
            receives = tuple(receive for receive, _ in arrived)
            by_receives.setdefault(receives, []).append((target, pieces if own is None else (own, *pieces)))
        for receives, each in by_receives.items():
            for target, sources in _together(each):
                yield Arrival(receives, target, sources)


def _together(each: Sequence[tuple[Region, tuple[Region, ...]]]) -> list[tuple[Region, tuple[Region, ...]]]:
    """Sums of neighbours as one sum."""
    runs: list[tuple[Region, ...]] = []
    for target, sources in each:
        regions = (target, *sources)
        follows = (
            runs and len(runs[-1]) == len(regions) and all(len(joined(pair)) == 1 for pair in zip(runs[-1], regions))
        )
        if follows:
            runs[-1] = tuple(joined(pair)[0] for pair in zip(runs[-1], regions))
        else:
            runs.append(regions)
    return [(run[0], run[1:]) for run in runs]
