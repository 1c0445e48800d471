"""The verifier accepts what is right (see test_closed_forms) and catches every broken schedule tried here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

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


def computes_right(schedule: Schedule) -> bool:
    """The schedule run on random numbers, by other code than the verifier's."""
    draw = Random(7)
    n, kind, chunks = schedule.n, schedule.kind, range(schedule.chunk_count)
    summed = kind in ("reduce", "all_reduce", "reduce_scatter")
    own = [{c: draw.getrandbits(60) for c in chunks} for _ in range(n)]
    owner = {c: 0 if kind in ("broadcast", "scatter") else c * n // schedule.chunk_count for c in chunks}
    state = [dict(own[r]) if summed else {c: own[r][c] for c in chunks if owner[c] == r} for r in range(n)]
    for one in schedule.rounds:
        try:
            moved = [(t, [(c, state[t.src][c]) for c in t.chunks]) for t in one]
        except KeyError:
            return False
        for t, values in moved:
            for c, value in values:
                state[t.dst][c] = state[t.dst].get(c, 0) + value if t.reduce else value
    for rank in range(n):
        for c in chunks:
            target = c * n // schedule.chunk_count
            match kind:
                case "all_to_all":
                    target = c * n * n // schedule.chunk_count % n
                case "send_recv":
                    target += 1
                case "broadcast" | "all_reduce" | "all_gather":
                    target = rank
                case "reduce" | "gather":
                    target = 0
            right = sum(values[c] for values in own) if summed else own[owner[c]][c]
            if target == rank and state[rank].get(c) != right:
                return False
    return True


@pytest.mark.parametrize("name", SOUND)
def test_every_broken_mutant_is_caught(name: str) -> None:
    """Some redirected reductions still reach the sum once: those only must compute the right numbers."""
    schedule = SOUND[name]
    verify(schedule)
    assert computes_right(schedule)
    caught = missed = 0
    for what, mutant in mutants(schedule):
        try:
            verify(mutant)
        except InvalidSchedule:
            caught += 1
        else:
            missed += 1
            assert what.startswith("redirected") and computes_right(mutant), f"{name}: {what} was not noticed"
    assert caught >= 4 * missed and caught >= len(schedule.rounds)


def test_order_of_rounds_matters() -> None:
    schedule = SOUND["bruck"]
    with pytest.raises(InvalidSchedule, match="does not hold chunk"):
        verify(replace(schedule, rounds=schedule.rounds[::-1]))


def test_statements() -> None:
    schedule = SOUND["ring all-reduce"]
    first = schedule.rounds[0][0]
    with pytest.raises(InvalidSchedule, match=r"round 0, 1 -> 0: the contribution of rank 1 .* reduced twice"):
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
