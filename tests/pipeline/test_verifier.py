"""The verifier accepts what can run and names the first thing that cannot; broken schedules are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.pipeline import Action, ActionKind, InvalidPipelineSchedule, build, verify
from shardwise.pipeline.schedule import PipelineSchedule, one_copy

F, B, I, W = ActionKind  # noqa: E741
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zbv", "v-half", "dualpipe", "dualpipev")


def with_rank(schedule: PipelineSchedule, rank: int, actions) -> PipelineSchedule:
    changed = list(schedule.actions)
    changed[rank] = tuple(actions)
    return replace(schedule, actions=tuple(changed))


def can_run(schedule: PipelineSchedule) -> bool:
    """By another way: the graph of order and dependencies has no cycle (Kahn), and everything is there once."""
    where = {}
    for rank, actions in enumerate(schedule.actions):
        for position, (kind, stage, j) in enumerate(actions):
            for name in {F: "F", B: "IW", I: "I", W: "W"}[kind]:
                if (name, stage, j) in where or schedule.rank_of(stage, j) != rank:
                    return False
                where[name, stage, j] = (rank, position)
    if len(where) != 3 * schedule.stages * schedule.microbatches:
        return False
    edges = set()
    for (name, s, j), node in where.items():
        before = {"F": [("F", s - 1, j)], "I": [("F", s, j), ("I", s + 1, j)], "W": [("I", s, j)]}[name]
        edges |= {(where[b], node) for b in before if b in where and where[b] != node}
    for rank, actions in enumerate(schedule.actions):
        edges |= {((rank, i), (rank, i + 1)) for i in range(len(actions) - 1)}
    waits = dict.fromkeys(where.values(), 0)
    after: dict = {node: [] for node in waits}
    for source, target in edges:
        waits[target] += 1
        after[source].append(target)
    free = [node for node, count in waits.items() if not count]
    done = 0
    while free:
        done += 1
        for target in after[free.pop()]:
            waits[target] -= 1
            if not waits[target]:
                free.append(target)
    return done == len(waits)


@settings(max_examples=examples(150), deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_swap_is_judged_as_a_graph_search_judges_it(name, data):
    schedule = build(name, 4, 4)
    rank = data.draw(st.integers(0, 3))
    actions = list(schedule.actions[rank])
    i, j = data.draw(st.tuples(*[st.integers(0, len(actions) - 1)] * 2))
    actions[i], actions[j] = actions[j], actions[i]
    broken = with_rank(schedule, rank, actions)
    if can_run(broken):
        verify(broken)
    else:
        with pytest.raises(InvalidPipelineSchedule):
            verify(broken)


@settings(max_examples=examples(100), deadline=None)
@given(
    name=st.sampled_from(NAMES),
    how=st.sampled_from(["drop", "twice", "other rank", "other microbatch"]),
    data=st.data(),
)
def test_mutants_are_found(name, how, data):
    schedule = build(name, 4, 4)
    rank = data.draw(st.integers(0, 3))
    actions = list(schedule.actions[rank])
    position = data.draw(st.integers(0, len(actions) - 1))
    action = actions[position]
    match how:
        case "drop":
            del actions[position]
        case "twice":
            actions.insert(data.draw(st.integers(0, len(actions))), action)
        case "other rank":
            del actions[position]
            other = (rank + 1) % 4
            assume(schedule.rank_of(action.stage, action.microbatch) != other)
            schedule = with_rank(schedule, other, (*schedule.actions[other], action))
        case "other microbatch":
            actions[position] = action._replace(microbatch=(action.microbatch + 1) % 4)
    with pytest.raises(InvalidPipelineSchedule):
        verify(with_rank(schedule, rank, actions))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0B0 0F0", "1F0 1B0"], r"rank 0, action 0 \(0B0\): comes before the forward of microbatch 0 on stage 0"),
        (["0F0 0W0 0I0", "1F0 1B0"], r"0W0\): comes before the backward of microbatch 0 on stage 0"),
        (["0F0 0B0 0B0", "1F0 1B0"], r"rank 0, action 2 \(0B0\): done before"),
        (["0F0 0I0 0B0", "1F0 1B0"], r"rank 0, action 2 \(0B0\): done before"),
        (["0F0 0B0 0W0", "1F0 1B0"], r"rank 0, action 2 \(0W0\): done before"),
        (["0F0 0I0", "1F0 1B0"], "stage 0 never runs the weight gradient of microbatch 0"),
        (["0F0", "1F0 1B0"], "stage 0 never runs the backward of microbatch 0"),
        (["0F0 0B0", "1B0"], "comes before the forward of microbatch 0 on stage 1"),
        (["0F0 0B0 1F0", "1B0"], "stage 1 of microbatch 0 is on rank 1"),
        (["0F0 0B0", "1F0 1B0 1F1"], "no such stage or microbatch"),
    ],
)
def test_the_first_violation_is_named(orders, message):
    actions = [[Action(ActionKind(t[1]), int(t[0]), int(t[2])) for t in order.split()] for order in orders]
    with pytest.raises(InvalidPipelineSchedule, match=message):
        verify(one_copy("broken", 1, (0, 1), actions))


def test_a_deadlock_is_named():
    def both(stage, first):
        return [Action(kind, stage, j) for j in (first, 1 - first) for kind in (F, B)]

    with pytest.raises(
        InvalidPipelineSchedule,
        match="deadlock: rank 1 waits before 1F1 for the forward of microbatch 1 on stage 0 of rank 0",
    ):
        verify(one_copy("crossed", 2, (0, 1), [both(0, 0), both(1, 1)]))


def test_a_placement_must_fit():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(InvalidPipelineSchedule, match="placement"):
        verify(replace(schedule, placements=((0, 2),)))
    with pytest.raises(InvalidPipelineSchedule, match="at least one"):
        verify(replace(schedule, microbatches=0))
