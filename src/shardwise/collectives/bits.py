"""Proof that a schedule leaves the same bits on every rank, though the order of sums changes them.

Every value is a number that stands for how it was computed: two are equal if they were copied from one place, or are
sums of equal values (a + b and b + a have equal bits; a + (b + c) and (a + b) + c may not).
"""

from __future__ import annotations

from shardwise.collectives.schedule import Schedule
from shardwise.collectives.verifier import goals, starts


def same_bits(schedule: Schedule) -> bool:
    """Whether all ranks that end with a chunk end with the same bits of it; what arrives in a round is added in the
    order of the round's transfers, to what the rank had."""
    known: dict[tuple[int, int], int] = {}

    def number(one: int, other: int) -> int:
        return known.setdefault((min(one, other), max(one, other)), len(known) + schedule.n * schedule.chunk_count)

    held = [
        {chunk: rank * schedule.chunk_count + chunk for chunk in chunks} for rank, chunks in enumerate(starts(schedule))
    ]
    for one in schedule.rounds:
        arrived: dict[tuple[int, int], int] = {}
        for t in one:
            for chunk in t.chunks:
                value, place = held[t.src][chunk], (t.dst, chunk)
                own = arrived.get(place, held[t.dst].get(chunk))
                arrived[place] = number(own, value) if t.reduce and own is not None else value
        for (rank, chunk), value in arrived.items():
            held[rank][chunk] = value
    ends: dict[int, int] = {}
    return all(
        ends.setdefault(chunk, held[rank][chunk]) == held[rank][chunk]
        for rank, chunks in enumerate(goals(schedule))
        for chunk in chunks
    )
