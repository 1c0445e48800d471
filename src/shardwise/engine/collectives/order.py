"""The order in which one rank posts, waits and adds: rounds are no barriers.

A message is sent as soon as what it carries is there; the rank waits for a receive only when something is sent, or
written, that depends on it. All receives whose memory is free are posted first: gloo sends a message only once its
receiver has said where it goes, so that a late receive costs a round trip.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.engine.collectives.layout import Region
from shardwise.engine.collectives.program import Arrival, Copy, Program, Receive, Send


@dataclass(frozen=True, slots=True)
class Post:
    """Start to receive."""

    receive: Receive


@dataclass(frozen=True, slots=True)
class Start:
    """Start to send."""

    send: Send


@dataclass(frozen=True, slots=True)
class Arrived:
    """Wait for a receive."""

    receive: Receive


@dataclass(frozen=True, slots=True)
class Sent:
    """Wait until a send no longer reads its memory."""

    send: Send


@dataclass(frozen=True, slots=True)
class Add:
    """``target`` becomes the sum of ``sources``; of one source, a copy."""

    target: Region
    sources: tuple[Region, ...]


Step = Post | Start | Arrived | Sent | Add


def ordered(program: Program) -> tuple[Step, ...]:
    return _Order().of(program)


class _Order:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.pending: list[Arrival] = []
        self.in_flight: list[Send] = []
        self.arrived: set[Receive] = set()

    def of(self, program: Program) -> tuple[Step, ...]:
        posts: dict[int, list[Receive]] = {}
        for one in program.rounds:
            for receive in one.receives:
                posts.setdefault(receive.post_round, []).append(receive)
        for index, one in enumerate(program.rounds):
            for receive in posts.get(index, ()):
                self._free(receive.region)
                self.steps.append(Post(receive))
            for send in one.sends:
                self._complete(send.reads)
                self.steps.append(Start(send))
                self.in_flight.append(send)
            if index == 0:
                self._copy(program.copies)
            self.pending += one.arrivals
        if not program.rounds:
            self._copy(program.copies)
        while self.pending:
            self._finish(self.pending[0])
        self.steps += [Sent(send) for send in self.in_flight]
        return tuple(self.steps)

    def _copy(self, copies: Iterable[Copy]) -> None:
        """While the first messages are on their way."""
        self.steps += [Add(copy.target, (copy.source,)) for copy in copies]

    def _complete(self, regions: Iterable[Region]) -> None:
        """What was to be written to ``regions`` in earlier rounds."""
        for region in regions:
            for arrival in [one for one in self.pending if one.target.overlaps(region)]:
                self._finish(arrival)

    def _free(self, region: Region) -> None:
        """Nothing reads or writes ``region`` any more."""
        for arrival in [one for one in self.pending if _uses(one, region)]:
            self._finish(arrival)
        self._no_longer_sent(region)

    def _no_longer_sent(self, region: Region) -> None:
        for send in [one for one in self.in_flight if one.source.overlaps(region)]:
            self.in_flight.remove(send)
            self.steps.append(Sent(send))

    def _finish(self, arrival: Arrival) -> None:
        """And before it what was to be done earlier with the same memory."""
        if arrival not in self.pending:
            return
        earlier = self.pending[: self.pending.index(arrival)]
        for other in earlier:
            if any(_uses(other, region) for region in (arrival.target, *arrival.sources)):
                self._finish(other)
        self.pending.remove(arrival)
        for receive in arrival.receives:
            if receive not in self.arrived:
                self.arrived.add(receive)
                self.steps.append(Arrived(receive))
        if arrival.sources:
            self._no_longer_sent(arrival.target)
            self.steps.append(Add(arrival.target, arrival.sources))


def _uses(arrival: Arrival, region: Region) -> bool:
    return any(one.overlaps(region) for one in (arrival.target, *arrival.sources))
