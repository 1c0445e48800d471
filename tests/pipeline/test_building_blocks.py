"""V-Half and V-Min: their blocks, and that running them early takes no longer than the authors' scheduler."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from shardwise.pipeline import (
    ActionKind,
    bubble_is_exact,
    bubble_seconds,
    build,
    equal_stages,
    peak_activations,
    peak_chunks_in_flight,
    simulate,
    verify,
)
from shardwise.pipeline.builders import building_block
from shardwise.pipeline.schedule import needs
from tables import table

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W  # noqa: E741
NAMES = ("v-half", "v-min")
BLOCKS = {
    "v-half": (building_block._half_starts, building_block._half_limit),
    "v-min": (building_block._min_starts, building_block._min_limit),
}
# Passes (F, I, W) and messages of each column of the file.
CASES = {
    "equal": ((1.0, 1.0, 1.0), 0.0),
    "unequal": ((1.0, 1.2, 0.8), 0.0),
    "messages": ((1.0, 1.0, 1.0), 0.1),
    "unequal_messages": ((1.0, 1.2, 0.8), 0.1),
    "long_messages": ((1.0, 1.0, 1.0), 0.5),
}


def published() -> dict[tuple[str, int], list[dict[str, str]]]:
    """Bubbles and peaks of the authors' scheduler, by schedule and ranks.

    `zbv_greedy.py` of https://github.com/sail-sg/zero-bubble-pipeline-parallelism at 39f2c18 made the orders; our
    simulator timed them (with equal passes and no messages its bubbles are theirs).
    """
    rows = defaultdict(list)
    with (Path(__file__).parent / "published_blocks.csv").open() as file:
        for row in csv.DictReader(file):
            rows[row["schedule"], int(row["ranks"])].append(row)
    return rows


PUBLISHED = published()


def idle_seconds(schedule, passes, message):
    return simulate(schedule, equal_stages(schedule.stages, *passes), message).bubble_seconds


def test_the_table_covers_every_size():
    assert set(PUBLISHED) == {(name, ranks) for name in NAMES for ranks in range(2, 17)}
    for (_, ranks), rows in PUBLISHED.items():
        assert {ranks, ranks + 1, 2 * ranks, 4 * ranks} <= {int(row["microbatches"]) for row in rows}


@pytest.mark.slow
@table("name", NAMES)
@table("ranks", range(2, 17))
def test_no_bubble_is_longer_and_no_peak_higher_than_published(name, ranks):
    for row in PUBLISHED[name, ranks]:
        schedule = build(name, ranks, int(row["microbatches"]))
        assert max(peak_activations(schedule)) <= int(row["peak_chunks"])
        for case, (passes, message) in CASES.items():
            assert idle_seconds(schedule, passes, message) <= float(row[case]) + 1e-3, (row, case)


@table("name", NAMES)
@table("ranks", range(2, 17))
def test_prices_are_those_of_the_schedule(name, ranks):
    for microbatches in {ranks, ranks + 1, ranks + ranks // 2, 3 * ranks}:
        schedule = build(name, ranks, microbatches)
        timeline = simulate(schedule, equal_stages(2 * ranks))
        assert bubble_is_exact(name, ranks, microbatches)
        bubble = bubble_seconds(name, ranks, microbatches)
        assert bubble == timeline.idle_seconds("apart") == timeline.idle_seconds("together")
        held = [peak_chunks_in_flight(name, ranks, microbatches, None, rank) for rank in range(ranks)]
        assert held == list(peak_activations(schedule))


@table("name", NAMES)
@table("ranks", [2, 3, 4, 5, 8, 9, 12])
def test_prices_of_unequal_passes_and_messages_come_near(name, ranks):
    for microbatches in (2 * ranks, 4 * ranks):
        schedule = build(name, ranks, microbatches)
        for passes, message in CASES.values():
            step = simulate(schedule, equal_stages(2 * ranks, *passes), message).longest_rank_seconds
            form = 2 * microbatches * sum(passes) + bubble_seconds(name, ranks, microbatches, None, *passes, message)
            assert form == pytest.approx(step, rel=0.05), (microbatches, passes, message)


@table("name", NAMES)
@table("ranks", [*range(1, 20), 32])
def test_blocks_never_collide_and_a_rank_may_hold_what_its_blocks_do(name, ranks):
    """The conditions under which nothing deadlocks."""
    starts, limit = BLOCKS[name]
    for rank in range(ranks):
        due = building_block._with_weight_gradients(starts(ranks, rank))
        down, back, back_input, down_input, back_weight, down_weight = due
        assert {unit % 6 for unit in due} == set(range(6))
        assert down < back < back_input < down_input
        assert back_input < back_weight <= back_input + 6
        assert down_input < down_weight <= down_input + 6
        for microbatches in (1, 2, ranks // 2, ranks, 3 * ranks):
            lives = ((down, down_weight), (back, back_weight))
            counts = [
                sum(forward + 6 * j <= now <= freed + 6 * j for forward, freed in lives for j in range(microbatches))
                for now in (start + 6 * j for start in (down, back) for j in range(microbatches))
            ]
            assert limit(ranks, microbatches, rank) >= max(counts, default=0)


@table("name", NAMES)
@table("ranks", [2, 3, 5, 8])
def test_an_input_comes_from_where_its_block_is_due_before(name, ranks):
    starts, _ = BLOCKS[name]
    due = [starts(ranks, rank) for rank in range(ranks)]
    for step, ahead in enumerate((-1, 1, -1, 1)):  # down and back again, and again
        for rank in range(ranks):
            if 0 <= rank + ahead < ranks:
                assert due[rank + ahead][step] < due[rank][step]


def test_forwards_enter_before_they_are_due_and_leave_room_for_others():
    """Two microbatches on the way down and one on the way back would fit on the last rank, but not the second back."""
    first, _, last = build("v-half", 3, 6).actions
    assert [str(action) for action in first[:4]] == ["0F0", "0F1", "0F2", "5F0"]
    assert [str(action) for action in last[:5]] == ["2F0", "3F0", "2F1", "3F1", "3I0"]


@table("name", NAMES)
def test_weight_gradients_wait_once_all_microbatches_have_entered(name):
    """No input gradient that could run comes after a weight gradient then."""
    schedule = build(name, 4, 12)
    timeline = simulate(schedule, equal_stages(8))
    done = {
        action: arrival
        for actions, arrivals in zip(schedule.actions, timeline.arrivals)
        for action, arrival in zip(actions, arrivals)
    }
    for actions, starts in zip(schedule.actions, timeline.starts):
        entered = max(i for i, action in enumerate(actions) if action.kind is F and action.stage < 4)
        for i in range(entered, len(actions) - 1):
            if actions[i].kind is W and actions[i + 1].kind is I:
                assert max(done[needed] for needed in needs(schedule, actions[i + 1])) > starts[i]


@pytest.mark.slow
@table("name", NAMES)
def test_short_schedules_up_to_44_ranks_are_valid_and_within_their_limit(name):
    _, limit = BLOCKS[name]
    for ranks in range(1, 45):
        for microbatches in {1, 2, ranks // 3 + 1, ranks // 2 + 1, max(1, ranks - 1), ranks, ranks + 2}:
            schedule = build(name, ranks, microbatches)
            verify(schedule)
            limits = [limit(ranks, microbatches, rank) for rank in range(ranks)]
            peaks = list(peak_activations(schedule))
            assert peaks == limits or (microbatches <= ranks and all(a <= b for a, b in zip(peaks, limits)))
            if microbatches >= ranks:
                assert simulate(schedule, equal_stages(2 * ranks)).bubble_seconds == bubble_seconds(
                    name, ranks, microbatches
                )
