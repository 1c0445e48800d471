"""Who is missing from a collective: by records made up for every case, and by real ranks that stop, skip and differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.run.records import (
    LEAST_COLLECTIVES,
    STALE_SECONDS,
    Collective,
    FlightRecord,
    GroupRecord,
    lateness,
    out_of_step,
    read_flight,
    read_flights,
)
from training.faults import small_job, train
from training.faulty_worker import Fault
from training.runs import write_shards

Calls = list[tuple[str, bool]]  # operation, whether it is done
REDUCED: tuple[str, bool] = ("all_reduce", True)
WAITS: tuple[str, bool] = ("all_reduce", False)


def group(ranks: tuple[int, ...], calls: Calls, meaning: str = "dp", size: int = 64) -> GroupRecord:
    every = tuple(Collective(number, name, size, done, number) for number, (name, done) in enumerate(calls, 1))
    return GroupRecord(f"{meaning} of {ranks}", meaning, ranks, every)


def record(rank: int, *groups: GroupRecord, at: float = 100.0) -> FlightRecord:
    return FlightRecord(rank, at, groups)


def said(*records: FlightRecord) -> tuple[tuple[int, ...], str] | None:
    found = out_of_step({one.rank: one for one in records})
    return None if found is None else (found.ranks, found.text)


def test_a_rank_that_has_begun_fewer_is_missing() -> None:
    three = (0, 1, 2)
    found = said(
        record(0, group(three, [REDUCED, WAITS])),
        record(1, group(three, [REDUCED])),
        record(2, group(three, [REDUCED, WAITS])),
    )
    assert found == ((1,), "rank 1 did not enter all-reduce #2 of dp; ranks 0, 2 wait in it")


def test_a_rank_whose_record_is_old_or_absent_left_none() -> None:
    both = (0, 1)
    waiting = record(0, group(both, [REDUCED, WAITS]))
    expected = ((1,), "rank 1 left no record of all-reduce #2 of dp; rank 0 waits in it")
    assert said(waiting) == expected
    assert said(waiting, record(1, group(both, [REDUCED, REDUCED]), at=100 - STALE_SECONDS)) == expected


@pytest.mark.parametrize(
    ("own", "size", "text"),
    [
        ("reduce_scatter", 64, "rank 1 entered reduce-scatter of 64 B"),
        ("all_reduce", 32, "rank 1 entered all-reduce of 32 B"),
        ("_allgather_base", 64, "rank 1 entered allgather-base"),
    ],
)
def test_a_rank_in_another_collective_is_named_with_both(own: str, size: int, text: str) -> None:
    three = (0, 1, 2)
    others = [record(rank, group(three, [REDUCED, WAITS])) for rank in (0, 2)]
    differs = record(1, group(three, [("all_reduce", True), (own, True)], size=size))
    if size != 64:  # its first was of the usual size
        first = Collective(1, "all_reduce", 64, True, 1)
        differs = record(
            1, GroupRecord(*differs.groups[0].key[:1], "dp", three, (first, *differs.groups[0].collectives[1:]))
        )
    found = said(*others, differs)
    assert found is not None
    assert found[0] == (1,)
    assert found[1] == f"collective #2 of dp: ranks 0, 2 entered all-reduce of 64 B, {text}"


def test_the_blame_goes_to_the_rank_that_waits_for_nobody() -> None:
    """Rank 0 waits for rank 1 in dp, which waits for rank 3 in tp; rank 2 waits for rank 3 in dp."""
    found = said(
        record(0, group((0, 1), [WAITS])),
        record(1, group((0, 1), []), group((1, 3), [WAITS], "tp")),
        record(2, group((2, 3), [WAITS])),
        record(3, group((2, 3), []), group((1, 3), [], "tp")),
    )
    assert found is not None
    assert found[0] == (3,)
    assert "rank 3 did not enter all-reduce #1 of" in found[1]


def test_groups_in_the_background_blame_only_where_nothing_else_does() -> None:
    both = (0, 1)
    ahead = group(both, [WAITS], "agreement")
    assert said(record(0, group(both, []), ahead), record(1, group(both, [WAITS]), group(both, [], "agreement"))) == (
        (0,), "rank 0 did not enter all-reduce #1 of dp; rank 1 waits in it"
    )  # fmt: skip
    assert said(record(0, ahead), record(1, group(both, [], "agreement"))) == (
        (1,), "rank 1 did not enter all-reduce #1 of agreement; rank 0 waits in it"
    )  # fmt: skip


def test_ranks_that_are_all_in_the_same_collective_are_not_blamed() -> None:
    both = (0, 1)
    assert said(*(record(rank, group(both, [REDUCED, WAITS])) for rank in both)) is None
    assert said() is None


def test_two_orders_of_the_same_collectives_are_told_from_each_other() -> None:
    three = (0, 1, 2)
    found = said(
        record(0, group(three, [WAITS]), group(three, [], "tp")),
        record(1, group(three, []), group(three, [WAITS], "tp")),
        record(2, group(three, [WAITS]), group(three, [], "tp")),
    )
    there = "rank 1 did not enter all-reduce #1 of dp; ranks 0, 2 wait in it; rank 1 waits in all-reduce #1 of tp"
    assert found == ((1,), there)
    two = (0, 1)
    assert said(
        record(0, group(two, [WAITS]), group(two, [], "tp")), record(1, group(two, []), group(two, [WAITS], "tp"))
    ) == ((), "each waits for another: rank 0 in all-reduce #1 of dp, rank 1 in all-reduce #1 of tp")


def arrivals(rank: int, late: float, ranks: tuple[int, ...] = (0, 1), gap: float = 1.0) -> FlightRecord:
    """Every collective begins ``late`` after its time; all take ``gap`` seconds."""
    times = [round((gap * number + late) * 1e9) for number in range(LEAST_COLLECTIVES)]
    some = tuple(Collective(number, "all_reduce", 8, True, at) for number, at in enumerate(times, 1))
    return FlightRecord(rank, 100.0, (GroupRecord("g", "dp", ranks, some),))


def test_a_rank_that_is_always_last_by_much_is_a_straggler() -> None:
    found = lateness({0: arrivals(0, 0.0), 1: arrivals(1, 0.3)}, {0: 0, 1: 0})
    assert [one.straggles for one in found] == [False, True]
    assert found[1].share == pytest.approx(0.3)
    little = lateness({0: arrivals(0, 0.0), 1: arrivals(1, 0.1)}, {0: 0, 1: 0})
    assert not any(one.straggles for one in little)


def test_delays_in_the_background_are_counted_once() -> None:
    """Two ranks begin three collectives 10 ms apart in each second, rank 1 each of them 300 ms later."""
    records = {}
    for rank, late in ((0, 0.0), (1, 0.3)):
        times = [round((second + 0.01 * part + late) * 1e9) for second in range(20) for part in range(3)]
        some = tuple(Collective(number, "all_reduce", 8, True, at) for number, at in enumerate(times, 1))
        records[rank] = FlightRecord(rank, 100.0, (GroupRecord("g", "dp", (0, 1), some),))
    (_, late) = lateness(records, {0: 0, 1: 0})
    assert late.share == pytest.approx(0.32, abs=0.01)


def test_ranks_that_take_turns_in_being_late_do_not_straggle() -> None:
    def turns(rank: int) -> FlightRecord:
        times = [round((number + (0.3 if number % 2 == rank else 0.0)) * 1e9) for number in range(LEAST_COLLECTIVES)]
        some = tuple(Collective(number, "all_reduce", 8, True, at) for number, at in enumerate(times, 1))
        return FlightRecord(rank, 100.0, (GroupRecord("g", "dp", (0, 1), some),))

    found = lateness({0: turns(0), 1: turns(1)}, {0: 0, 1: 0})
    assert [one.share for one in found] == pytest.approx([0.15, 0.15], abs=0.02)
    assert not any(one.straggles for one in found)


def test_ranks_of_different_stages_are_not_compared() -> None:
    assert lateness({0: arrivals(0, 0.0), 1: arrivals(1, 0.3)}, {0: 0, 1: 1}) == ()


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    whole = record(0, group((0, 1), [REDUCED]))
    whole.write(tmp_path)
    assert read_flight(tmp_path, 0) == whole
    path = tmp_path / "rank-0.flight.json"
    path.write_text(path.read_text()[:-20])
    assert read_flights(tmp_path, range(2)) == {}


# -- real ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_a_skipping_and_a_differing_rank_are_named(tmp_path: Path) -> None:
    """One attempt after the other: four ranks, so that most of them agree."""
    faults = [
        Fault("stop", "backward", 3, rank=2, attempt=1),
        Fault("skip", "backward", 3, rank=1, attempt=2),
        Fault("differ", "begin", 3, rank=3, attempt=3),
    ]
    patient: dict[str, Any] = {"restarts": 2, "timeouts": {"start": 100, "step": 6, "checkpoint": 60}}
    job = small_job(write_shards(tmp_path / "words"), 4, run=patient, dp=4, zero=0)
    ended = train(job, tmp_path / "run", *faults)
    ended.require(
        1,
        "rank 2 (step, step 3): no sign of life for",
        "rank 2 left no record of all-reduce #",
        "ranks 0, 1, 3 wait in it; restart 1 of 2",
        "ranks 0, 2, 3 wait in it",
    )
    assert re.search(r"rank 1 did not enter all-reduce #\d+ of all ranks", ended.said)
    differing = (
        r"rank 3 did not enter all-reduce #\d+ of dp; ranks 0, 1, 2 wait in it; rank 3 waits in broadcast #\d+ of"
    )
    assert re.search(differing, ended.said)
    last = read_flights(ended.folder / "attempts" / "attempt-0003", range(4))
    assert len(last) == 4
    assert {one.meaning for one in last[0].groups} >= {"dp", "all ranks"}
