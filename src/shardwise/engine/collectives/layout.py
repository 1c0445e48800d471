"""Where the chunks of a schedule lie in a rank's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule
from shardwise.collectives.verifier import goals, starts

INPUT, OUTPUT, STAGING = "input", "output", "staging"
IN_PLACE = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)


@dataclass(frozen=True, slots=True)
class Region:
    """Elements ``start`` to ``stop`` of a flat buffer."""

    buffer: str
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


def joined(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same regions, with those made one that follow on one another."""
    runs: list[Region] = []
    for region in regions:
        if runs and runs[-1].buffer == region.buffer and runs[-1].stop == region.start:
            runs[-1] = Region(region.buffer, runs[-1].start, region.stop)
        else:
            runs.append(region)
    return tuple(runs)


@dataclass(frozen=True)
class Layout:
    """``first``: where each chunk that a rank holds at the beginning is; ``home``: where it has to end.

    ``order`` is the order of chunks in a message, ``sizes`` their elements.
    """

    first: dict[int, Region]
    home: dict[int, Region]
    order: list[int]
    sizes: list[int]


def layout_of(schedule: Schedule, rank: int, elements: int) -> Layout:
    """``elements`` are those of the tensor (all-reduce, broadcast, reduce) or of one rank's block of it.

    What does not divide evenly is cut into chunks that differ by one element; some may be empty.
    """
    held, wanted = starts(schedule)[rank], dict(enumerate(goals(schedule))).get(rank, {})
    if schedule.kind in IN_PLACE:
        count = schedule.chunk_count
        order = _neighbours(schedule)
        bounds = [slot * elements // count for slot in range(count + 1)]
        at = {chunk: Region(OUTPUT, bounds[slot], bounds[slot + 1]) for slot, chunk in enumerate(order)}
        sizes = [at[chunk].elements for chunk in range(count)]
        return Layout({c: at[c] for c in held}, {c: at[c] for c in wanted}, _inverse(order), sizes)
    blocks = schedule.n**2 if schedule.kind is CollectiveKind.ALL_TO_ALL else schedule.n
    split = schedule.chunk_count // blocks
    bounds = [part * elements // split for part in range(split + 1)]

    def region(buffer: str, block: int, chunk: int) -> Region:
        part = chunk % split
        return Region(buffer, block * elements + bounds[part], block * elements + bounds[part + 1])

    sizes = [bounds[chunk % split + 1] - bounds[chunk % split] for chunk in range(schedule.chunk_count)]
    into, out_of = _blocks(schedule)
    return Layout(
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
    """Chunks of a whole tensor in an order in which those that travel together lie together: then they are sent from
    where they are. Every rank finds the same order, and no other promise is made about which chunk is which part."""
    travels: list[list[int]] = [[] for _ in range(schedule.chunk_count)]
    number = 0
    for one in schedule.rounds:
        for t in one:
            for chunk in t.chunks:
                travels[chunk].append(number)
            number += 1
    return sorted(range(schedule.chunk_count), key=travels.__getitem__)


def _inverse(order: list[int]) -> list[int]:
    places = [0] * len(order)
    for place, chunk in enumerate(order):
        places[chunk] = place
    return places
