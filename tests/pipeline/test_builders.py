"""Every builder makes a schedule that the verifier accepts, of the shape its paper describes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.pipeline import ActionKind, build, chunks_per_rank, equal_stages, simulate, verify
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import job_schedules, schedule_records
from tables import table

SCHEDULES = job_schedules()
NAMES = tuple(one.name for one in schedule_records())

F, B, I, W = ActionKind  # noqa: E741
FIXED = [name for name in NAMES if name != "zb-auto"]


def any_build(name: str, ranks: int, microbatches: int):
    if name == "dualpipe" and ranks % 2 and ranks > 1:
        ranks += 1
    if name == "interleaved":
        microbatches *= ranks
    return build(name, ranks, microbatches, memory_limit=max(1, ranks * 1.5) if name == "zb-auto" else None)


def test_every_schedule_that_a_job_can_name_has_a_builder():
    assert set(SCHEDULES) <= set(NAMES)


@settings(max_examples=examples(120), deadline=None)
@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 9), microbatches=st.integers(1, 22))
def test_every_built_schedule_is_valid(name, ranks, microbatches):
    schedule = any_build(name, ranks, microbatches)
    verify(schedule)
    assert schedule.stages == schedule.ranks * chunks_per_rank(name)


@table("name", NAMES)
@table("ranks", [1, 4])
def test_one_microbatch_passes_straight_through(name, ranks):
    schedule = build(name, ranks, 1 if name != "interleaved" else ranks, memory_limit=2 if name == "zb-auto" else None)
    verify(schedule)
    if name == "interleaved":
        return
    stages = schedule.stages
    # Forward and input gradient of every stage, and at the end the first rank's own weight gradients.
    span = simulate(schedule, equal_stages(stages)).makespan_seconds
    backward = 2 if any(a.kind is B for own in schedule.actions for a in own) else 1
    assert span <= stages * (1 + backward) + 2


@table("name", FIXED)
def test_one_rank_never_waits(name):
    schedule = build(name, 1, 6)
    timeline = simulate(schedule, equal_stages(schedule.stages, 2.0, 3.0, 1.0), comm_seconds=5.0)
    assert timeline.bubble_seconds == pytest.approx(0.0)


def test_1f1b_order():
    assert " ".join(map(str, build("1f1b", 3, 4).actions[1])) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"


def test_interleaved_order_is_megatrons():
    # Megatron-LM, p=2, m=4, v=2: rank 0 warms up with 2(p-r-1) + (v-1)p = 4 forwards, chunk by chunk.
    first, second = build("interleaved", 2, 4, chunks=2).actions
    assert " ".join(map(str, first[:9])) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2"
    assert " ".join(map(str, second[:7])) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2"


def test_interleaved_refuses_a_broken_group_and_says_what_would_do():
    with pytest.raises(SpecError, match="use 4 or 8 microbatches, or schedule 1f1b"):
        build("interleaved", 4, 6)
    with pytest.raises(SpecError, match="use 4 microbatches"):
        build("interleaved", 4, 3)


def test_zb_h1_delays_weight_gradients_by_the_rank():
    schedule = build("zb-h1", 4, 8)
    for rank, actions in enumerate(schedule.actions):
        order = {action: position for position, action in enumerate(actions)}
        for j in range(8 - rank):
            after = order[actions[0]._replace(kind=W, microbatch=j)]
            assert order[actions[0]._replace(kind=I, microbatch=j + rank)] == after - 1


def test_v_schedules_put_both_ends_on_the_first_rank():
    for name in ("zbv", "v-half", "v-min", "dualpipev"):
        assert build(name, 3, 6).placement == (0, 1, 2, 2, 1, 0)


def test_dualpipe_holds_two_copies_and_mirrors_itself():
    schedule = build("dualpipe", 4, 8)
    assert schedule.placements == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert schedule.stages_of(0) == (0, 3)
    assert schedule.rank_of(0, 0) == 0
    assert schedule.rank_of(0, 7) == 3
    mirrored = [a._replace(microbatch=(a.microbatch + 4) % 8) for a in schedule.actions[3]]
    assert mirrored == list(schedule.actions[0])


def test_dualpipe_refuses_an_odd_pipeline():
    with pytest.raises(SpecError, match="use 4 or 6 ranks, or dualpipev"):
        build("dualpipe", 5, 10)


def test_dualpipe_folded_is_dualpipev():
    """DualPipeV on p ranks does what DualPipe on 2p ranks does on its first half, with its own stage numbers."""
    whole, folded = build("dualpipe", 8, 16), build("dualpipev", 4, 8)
    for rank in range(4):
        kinds = [(a.kind, a.stage, a.microbatch % 8) for a in whole.actions[rank]]
        assert kinds == [tuple(a) for a in folded.actions[rank]]


def test_zero_bubble_means_zero():
    for name, ranks, microbatches in (("zb-h2", 6, 11), ("zbv", 6, 11), ("zb-2p", 6, 12)):
        schedule = build(name, ranks, microbatches)
        assert simulate(schedule, equal_stages(schedule.stages)).bubble_seconds == pytest.approx(0.0)


def test_more_memory_never_costs_time():
    costs = []
    for limit in (2, 4, 6, 8, 12, 16):
        schedule = build("zb-auto", 8, 24, memory_limit=limit)
        verify(schedule)
        costs.append(simulate(schedule, equal_stages(8)).longest_rank_seconds)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 24 * 3


def test_action_text_is_what_pytorch_reads():
    """torch.distributed.pipelining writes an action as stage, kind, microbatch."""
    for name in FIXED:
        for actions in any_build(name, 2, 4).actions:
            assert all(re.fullmatch(r"\d+[FBIW]\d+", str(action)) for action in actions)


def test_a_schedule_prints_small():
    assert str(build("zb-h1", 2, 2)) == (
        "zb-h1: 2 ranks, 2 stages, 2 microbatches\n0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1I0 1F1 1I1 1W0 1W1"
    )


@table(
    ("arguments", "field"),
    [
        (("1f2b", 2, 2), "schedule"),
        (("1f1b", 0, 2), "ranks"),
        (("1f1b", 2, 0), "microbatches"),
        (("1f1b", 2, True), "microbatches"),
        (("1f1b", 2, 2, 2), "chunks"),
        (("zbv", 2, 2, 3), "chunks"),
        (("interleaved", 2, 2, 0), "chunks"),
        (("zb-auto", 2, 2), "memory_limit"),
        (("zb-auto", 2, 2, None, None, 0.5), "memory_limit"),
        (("1f1b", 2, 2, None, None, 4), "memory_limit"),
        (("zb-1p", 2, 2, None, equal_stages(3)), "times"),
        (("zb-1p", 2, 2, None, None, None, 0.0, 1.5), "released_by_input_grad"),
    ],
)
def test_mistakes_name_their_field(arguments, field):
    with pytest.raises(SpecError) as caught:
        build(*arguments)
    assert caught.value.field == field
    assert caught.value.remedy
