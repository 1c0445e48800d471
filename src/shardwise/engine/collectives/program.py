"""A schedule as one rank runs it: where its chunks lie, what it sends, receives and adds, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from shardwise.collectives.schedule import CollectiveKind, Round, Schedule, Transfer, goals, starts

INPUT, OUTPUT, STAGING = "input", "output", "staging"
IN_PLACE = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Elements ``start`` to ``stop`` of a flat buffer."""

    buffer: str
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: TensorRegion) -> bool:
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


def merged(regions: Iterable[TensorRegion]) -> tuple[TensorRegion, ...]:
    """The same regions, with adjacent ones merged."""
    runs: list[TensorRegion] = []
    for region in regions:
        if runs and runs[-1].buffer == region.buffer and runs[-1].stop == region.start:
            runs[-1] = TensorRegion(region.buffer, runs[-1].start, region.stop)
        else:
            runs.append(region)
    return tuple(runs)


@dataclass(frozen=True)
class ChunkLayout:
    """Where the chunks of a schedule lie on one rank."""

    first: dict[int, TensorRegion]  # where each chunk that the rank holds at the beginning is
    home: dict[int, TensorRegion]  # where each chunk that it needs in the end has to be
    order: list[int]  # the order of chunks in a message
    sizes: list[int]  # elements of each chunk


def layout_of(schedule: Schedule, rank: int, elements: int) -> ChunkLayout:
    """The layout for a tensor (all-reduce, broadcast, reduce), or one rank's block of it, of so many ``elements``.

    If they do not divide evenly, chunks differ by one element; some may be empty.
    """
    held, wanted = starts(schedule)[rank], dict(enumerate(goals(schedule))).get(rank, {})
    if schedule.kind in IN_PLACE:
        count = schedule.chunk_count
        order = _neighbours(schedule)
        bounds = [slot * elements // count for slot in range(count + 1)]
        at = {chunk: TensorRegion(OUTPUT, bounds[slot], bounds[slot + 1]) for slot, chunk in enumerate(order)}
        sizes = [at[chunk].elements for chunk in range(count)]
        places = sorted(range(count), key=order.__getitem__)  # the slot of each chunk
        return ChunkLayout({c: at[c] for c in held}, {c: at[c] for c in wanted}, places, sizes)
    blocks = schedule.n**2 if schedule.kind is CollectiveKind.ALL_TO_ALL else schedule.n
    split = schedule.chunk_count // blocks
    bounds = [part * elements // split for part in range(split + 1)]

    def region(buffer: str, block: int, chunk: int) -> TensorRegion:
        part = chunk % split
        return TensorRegion(buffer, block * elements + bounds[part], block * elements + bounds[part + 1])

    sizes = [bounds[chunk % split + 1] - bounds[chunk % split] for chunk in range(schedule.chunk_count)]
    into, out_of = _blocks(schedule)
    return ChunkLayout(
        {chunk: region(INPUT, into(chunk // split), chunk) for chunk in held},
        {chunk: region(OUTPUT, out_of(chunk // split), chunk) for chunk in wanted},
        list(range(schedule.chunk_count)),
        sizes,
    )


def _blocks(schedule: Schedule) -> tuple[Callable[[int], int], Callable[[int], int]]:
    """Which block of the input and of the output a block of the schedule is."""
    n, kind = schedule.n, schedule.kind
    if kind is CollectiveKind.ALL_TO_ALL:
        return lambda block: block % n, lambda block: block // n
    whole_input = kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.SCATTER)
    whole_output = kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
    return lambda block: block * whole_input, lambda block: block * whole_output


def _neighbours(schedule: Schedule) -> list[int]:
    """Chunks of a whole tensor, ordered so that the chunks of one message are adjacent and need no packing.

    The order is the same on every rank; otherwise nothing is promised about which chunk is which part of the tensor.
    """
    travels: list[list[int]] = [[] for _ in range(schedule.chunk_count)]
    for number, transfer in enumerate(chain.from_iterable(schedule.rounds)):
        for chunk in transfer.chunks:
            travels[chunk].append(number)
    return sorted(range(schedule.chunk_count), key=travels.__getitem__)


@dataclass(frozen=True, slots=True)
class Send:
    peer: int
    number: int  # counts the messages between the two ranks
    source: TensorRegion
    packed: tuple[TensorRegion, ...] = ()  # regions that are copied into `source` first

    @property
    def reads(self) -> tuple[TensorRegion, ...]:
        return self.packed or (self.source,)


@dataclass(frozen=True, slots=True)
class Receive:
    peer: int
    number: int
    region: TensorRegion
    post_round: int = 0  # the round before whose sends the region is free to be written


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """What to do once ``receives`` have arrived: sum ``sources``, in order, into ``target``."""

    receives: tuple[Receive, ...]
    target: TensorRegion
    sources: tuple[TensorRegion, ...] = ()  # empty if the message was received in its place


@dataclass(frozen=True, slots=True)
class OwnRound:
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    arrivals: tuple[ReceivedChunk, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """``target`` becomes the sum of ``sources``; of one source, a copy."""

    target: TensorRegion
    sources: tuple[TensorRegion, ...]


@dataclass(frozen=True)
class Program:
    """Everything that one rank does in a collective."""

    rounds: tuple[OwnRound, ...]
    copies: tuple[Add, ...]  # of what the rank sends to itself
    staging_elements: int  # staging memory that it takes


def program_of(schedule: Schedule, rank: int, elements: int) -> Program:
    """What ``rank`` does; for ``elements`` see `layout_of`."""
    return _Translation(schedule, rank, layout_of(schedule, rank, elements)).program()


# A chunk, the messages that bring it, where they put it, and whether it is added to what is there.
_Arriving = tuple[int, tuple[Receive, ...], tuple[TensorRegion, ...], bool]


class _Translation:
    """Translates a schedule into the program of one rank.

    A message is received in its final place if nothing there is still needed. Otherwise, and if it is to be added, it
    gets staging memory of its own, so that its receive can be posted before the first round.
    """

    def __init__(self, schedule: Schedule, rank: int, layout: ChunkLayout) -> None:
        self.schedule, self.rank, self.layout = schedule, rank, layout
        self.place = dict(layout.first)
        self.staged = 0
        self.used: dict[int, int] = {}  # the last round in which a chunk's home was read or written
        self.messages: dict[tuple[int, int], int] = {}

    def program(self) -> Program:
        rounds = tuple(self._round(index, transfers) for index, transfers in enumerate(self.schedule.rounds))
        home, sizes = self.layout.home, self.layout.sizes
        away = [chunk for chunk in home if sizes[chunk] and self.place[chunk] != home[chunk]]
        copies = [(home[chunk], (self.place[chunk],)) for chunk in away]
        return Program(rounds, tuple(Add(*run) for run in _together(copies)), self.staged)

    def _round(self, index: int, transfers: Round) -> OwnRound:
        sends: list[Send] = []
        receives: list[Receive] = []
        added: dict[int, list[tuple[Receive, TensorRegion]]] = {}
        moved: list[_Arriving] = []
        for t in transfers:
            present = filter(self.layout.sizes.__getitem__, t.chunks)
            chunks = sorted(present, key=self.layout.order.__getitem__)  # as they lie in memory
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
                        moved.append((chunk, (receive,), (piece,), False))
        sums: list[_Arriving] = []
        for chunk, arriving in added.items():
            sums.append((chunk, tuple(receive for receive, _ in arriving), tuple(piece for _, piece in arriving), True))
        arrivals = [*self._arrivals(moved, index), *self._arrivals(sums, index)]
        return OwnRound(tuple(sends), tuple(receives), tuple(arrivals))

    def _stage(self, elements: int) -> TensorRegion:
        self.staged += elements
        return TensorRegion(STAGING, self.staged - elements, self.staged)

    def _send(self, peer: int, number: int, chunks: list[int], index: int) -> Send:
        for chunk in chunks:
            self.used[chunk] = index
        runs = merged(self.place[chunk] for chunk in chunks)
        if len(runs) == 1:
            return Send(peer, number, runs[0])
        return Send(peer, number, self._stage(sum(run.elements for run in runs)), runs)

    def _receive(self, t: Transfer, number: int, chunks: list[int], index: int) -> tuple[Receive, list[TensorRegion]]:
        """Receives in the final place, unless it is to be added, is not contiguous there, or was just in use."""
        homes = [self.layout.home.get(chunk) for chunk in chunks]
        settled = [home for home in homes if home is not None]
        last = max(self.used.get(chunk, -1) for chunk in chunks)
        if not t.reduce and len(settled) == len(homes) and len(merged(settled)) == 1 and last < index - 1:
            (home,) = merged(settled)
            return Receive(t.src, number, home, index - 1 if last >= 0 else 0), settled
        staged = self._stage(sum(self.layout.sizes[chunk] for chunk in chunks))
        pieces, start = [], staged.start
        for chunk in chunks:
            pieces.append(TensorRegion(STAGING, start, start + self.layout.sizes[chunk]))
            start = pieces[-1].stop
        return Receive(t.src, number, staged), pieces

    def _arrivals(self, arriving: list[_Arriving], index: int) -> Iterable[ReceivedChunk]:
        by_receives: dict[tuple[Receive, ...], list[tuple[TensorRegion, tuple[TensorRegion, ...]]]] = {}
        for chunk, receives, pieces, is_sum in arriving:
            own, target = self.place.get(chunk), self.layout.home.get(chunk, pieces[0])
            self.place[chunk], self.used[chunk] = target, index
            if is_sum:
                sources = pieces if own is None else (own, *pieces)
            else:
                sources = () if pieces == (target,) else pieces
            by_receives.setdefault(receives, []).append((target, sources))
        for receives, each in by_receives.items():
            for target, sources in _together(each):
                yield ReceivedChunk(receives, target, sources)


def _together(
    each: Sequence[tuple[TensorRegion, tuple[TensorRegion, ...]]],
) -> list[tuple[TensorRegion, tuple[TensorRegion, ...]]]:
    """Merges sums of adjacent regions into one sum."""
    runs: list[tuple[TensorRegion, ...]] = []
    for target, sources in each:
        regions = (target, *sources)
        follows = (
            runs and len(runs[-1]) == len(regions) and all(len(merged(pair)) == 1 for pair in zip(runs[-1], regions))
        )
        if follows:
            runs[-1] = tuple(merged(pair)[0] for pair in zip(runs[-1], regions))
        else:
            runs.append(regions)
    return [(run[0], run[1:]) for run in runs]


@dataclass(frozen=True, slots=True)
class Start:
    message: Send | Receive


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a message has arrived, or no longer reads its memory."""

    message: Send | Receive


Step = Start | Wait | Add


def ordered(program: Program) -> tuple[Step, ...]:
    return _Order().of(program)


class _Order:
    """Puts the steps of a program into order, without barriers between rounds.

    A message is sent as soon as its data is there, and the rank waits for a receive only when something that depends on
    it is sent or written. All receives whose memory is free are posted first: gloo sends a message only once its
    receiver has named the buffer, so a late receive costs a round trip.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.pending: list[ReceivedChunk] = []
        self.in_flight: list[Send] = []
        self.arrived: set[Receive] = set()

    def of(self, program: Program) -> tuple[Step, ...]:
        posts: dict[int, list[Receive]] = {}
        for own_round in program.rounds:
            for receive in own_round.receives:
                posts.setdefault(receive.post_round, []).append(receive)
        for index, own_round in enumerate(program.rounds):
            for receive in posts.get(index, ()):
                for arrival in [pending for pending in self.pending if _uses(pending, receive.region)]:
                    self._finish(arrival)
                self._no_longer_sent(receive.region)
                self.steps.append(Start(receive))
            for send in own_round.sends:
                for region in send.reads:  # what earlier rounds write there comes first
                    for arrival in [pending for pending in self.pending if pending.target.overlaps(region)]:
                        self._finish(arrival)
                self.steps.append(Start(send))
                self.in_flight.append(send)
            if index == 0:
                self.steps += program.copies  # while the first messages are in flight
            self.pending += own_round.arrivals
        if not program.rounds:
            self.steps += program.copies
        while self.pending:
            self._finish(self.pending[0])
        self.steps += [Wait(send) for send in self.in_flight]
        return tuple(self.steps)

    def _no_longer_sent(self, region: TensorRegion) -> None:
        for send in [started for started in self.in_flight if started.source.overlaps(region)]:
            self.in_flight.remove(send)
            self.steps.append(Wait(send))

    def _finish(self, arrival: ReceivedChunk) -> None:
        """Waits for an arrival and adds it, after whatever used the same memory earlier."""
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
                self.steps.append(Wait(receive))
        if arrival.sources:
            self._no_longer_sent(arrival.target)
            self.steps.append(Add(arrival.target, arrival.sources))


def _uses(arrival: ReceivedChunk, region: TensorRegion) -> bool:
    return any(used.overlaps(region) for used in (arrival.target, *arrival.sources))
