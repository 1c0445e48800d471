"""Every schedule on real processes against the reference: random sizes, formats and groups; equal bits on all ranks."""

from __future__ import annotations

import pytest

from engine.collectives.schedule_cases import run_all, schedules
from engine.workers import on_ranks
from shardwise.collectives import CollectiveKind, Topology, Transfer, build_schedule, verify
from shardwise.collectives.build import pipelined
from shardwise.collectives.schedule import Schedule, goals, schedule_of, starts


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", range(2, 9))
def test_every_schedule_does_what_its_collective_does(world: int) -> None:
    results = on_ranks(world, run_all, world, False)
    assert [one.wrong for one in results] == [[]] * world
    assert len({one.bits[0] for one in results}) == 1
    assert len({one.bits[1] for one in results} - {0}) == 1


def test_every_schedule_runs_in_rounds() -> None:
    """As on NCCL, where a round is one operation."""
    results = on_ranks(4, run_all, 7, True)
    assert [one.wrong for one in results] == [[]] * 4


@pytest.mark.parametrize("n", range(1, 10))
def test_every_schedule_ends_with_equal_bits(n: int) -> None:
    for schedule in schedules(n):
        assert same_bits(schedule), schedule
        verify(pipelined(schedule, 3))


def same_bits(schedule: Schedule) -> bool:
    """Whether all ranks that end with a chunk end with the same bits of it, though the order of sums changes them.

    What arrives in a round is added in the order of its transfers, to what the rank had. Every value is a number that
    stands for how it was computed: two are equal if they were copied from one place, or are sums of equal values
    (a + b and b + a have equal bits; a + (b + c) and (a + b) + c may not).
    """
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


def test_sums_in_different_orders_are_found() -> None:
    """Each of three ranks adds the others' numbers to its own: all have the sum, not all the same bits."""
    everything = [Transfer(src, dst, (0,), reduce=True) for src in range(3) for dst in range(3) if src != dst]
    schedule = schedule_of(CollectiveKind.ALL_REDUCE, 3, 1, [everything], "everyone adds")
    verify(schedule)
    assert not same_bits(schedule)


def test_a_piece_follows_the_other() -> None:
    whole = build_schedule("all_reduce", Topology.hierarchical([2, 2], [1e9, 1e8], [0, 0]))
    cut = pipelined(whole, 4)
    assert len(cut.rounds) == len(whole.rounds) + 3
    verify(cut)
