"""The verifier accepts what is right (see test_closed_forms) and catches every broken schedule tried here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwise.collectives import InvalidSchedule, Schedule, Topology, Transfer, build_schedule, verify

HIERARCHY = Topology.hierarchical([3, 2], [1e9, 1e9], [0, 0], ["ring", "switch"])
# Schedules in which no transfer is superfluous.
SOUND = {
    "ring all-reduce": build_schedule("all_reduce", Topology.ring(4, 1, 0)),
    "bidirectional ring": build_schedule("all_gather", Topology.ring(6, 1, 0), "bidirectional_ring"),
    "line": build_schedule("reduce_scatter", Topology.line(5, 1, 0)),
    "bruck": build_schedule("all_gather", Topology.switch(6, 1, 0), "bruck"),
    "bruck all-to-all": build_schedule("all_to_all", Topology.switch(5, 1, 0), "bruck"),
    "binomial scatter": build_schedule("scatter", Topology.tree(7, 1, 0)),
    "binomial reduce": build_schedule("reduce", Topology.tree(6, 1, 0)),
    "chain": build_schedule("broadcast", Topology.line(4, 1, 0), chunks=3),
    "direct reduce-scatter": build_schedule("reduce_scatter", Topology.switch(4, 1, 0)),
    "halving": build_schedule("all_reduce", Topology.switch(6, 1, 0), "halving_doubling"),
    "double tree": build_schedule("all_reduce", Topology.switch(6, 1, 0), "double_binary_tree", chunks=2),
    "bucket": build_schedule("all_gather", Topology.torus("3x4", 1, 0)),
    "pairwise": build_schedule("all_to_all", Topology.switch(4, 1, 0), "pairwise"),
    "send_recv": build_schedule("send_recv", Topology.ring(4, 1, 0)),
    "hierarchical": build_schedule("all_reduce", HIERARCHY),
    "hierarchical all-to-all": build_schedule("all_to_all", HIERARCHY),
    "hierarchical gather": build_schedule("gather", HIERARCHY),
}


def with_transfer(schedule: Schedule, at: int, index: int, new: tuple[Transfer, ...]) -> Schedule:
    one = schedule.rounds[at]
    changed = one[:index] + new + one[index + 1 :]
    return replace(schedule, rounds=(*schedule.rounds[:at], changed, *schedule.rounds[at + 1 :]))


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for at, one in enumerate(schedule.rounds):
        for index, t in enumerate(one):
            yield f"dropped {t} of round {at}", with_transfer(schedule, at, index, ())
            if t.reduce:
                yield f"doubled {t} of round {at}", with_transfer(schedule, at, index, (t, t))
            other = next(rank for rank in range(schedule.n) if rank not in (t.src, t.dst))
            yield f"redirected {t} of round {at}", with_transfer(schedule, at, index, (replace(t, dst=other),))
            if schedule.chunk_count > 1:
                wrong = (t.chunks[0] + 1) % schedule.chunk_count
                if wrong not in t.chunks:
                    swapped = replace(t, chunks=(wrong, *t.chunks[1:]))
                    yield f"changed a chunk of {t} of round {at}", with_transfer(schedule, at, index, (swapped,))
            if len(t.chunks) > 1:
                shorter = replace(t, chunks=t.chunks[1:])
                yield f"shortened {t} of round {at}", with_transfer(schedule, at, index, (shorter,))


@pytest.mark.parametrize("name", SOUND)
def test_every_mutant_is_caught(name: str) -> None:
    schedule = SOUND[name]
    verify(schedule)
    count = 0
    for what, mutant in mutants(schedule):
        count += 1
        with pytest.raises(InvalidSchedule):
            verify(mutant)
            pytest.fail(f"{name}: {what} was not noticed")
    assert count >= len(schedule.rounds)


def test_order_of_rounds_matters() -> None:
    schedule = SOUND["bruck"]
    with pytest.raises(InvalidSchedule, match="does not hold chunk"):
        verify(replace(schedule, rounds=schedule.rounds[::-1]))


def test_statements() -> None:
    schedule = SOUND["ring all-reduce"]
    first = schedule.rounds[0][0]
    with pytest.raises(InvalidSchedule, match=r"round 0, 0 -> 3: the contribution of rank 0 .* reduced twice"):
        verify(with_transfer(schedule, 0, 0, (first, first)))
    with pytest.raises(InvalidSchedule, match="not a pair of different ranks"):
        verify(with_transfer(schedule, 0, 0, (replace(first, dst=first.src),)))
    with pytest.raises(InvalidSchedule, match=r"at the end rank .* holds"):
        verify(replace(schedule, rounds=schedule.rounds[:-1]))
    with pytest.raises(InvalidSchedule, match="even blocks"):
        verify(replace(SOUND["bruck"], chunk_count=7))
    broadcast = SOUND["chain"]
    with pytest.raises(InvalidSchedule, match="arrives twice"):
        verify(with_transfer(broadcast, 0, 0, broadcast.rounds[0] * 2))
