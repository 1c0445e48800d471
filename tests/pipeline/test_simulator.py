"""The simulator against a longest-path search, and what a timeline says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import calls_of, examples
from shardwise.pipeline import (
    Action,
    ActionKind,
    InvalidPipelineSchedule,
    build,
    equal_stages,
    live_activations,
    peak_activations,
    simulate,
    stage_times,
    verify,
)
from shardwise.pipeline.schedule import PipelineSchedule, one_copy
from shardwise.spec.errors import SpecError

F, B, I, W = ActionKind  # noqa: E741


@st.composite
def random_schedules(draw):
    """Any valid schedule: random placement, then any runnable action next, on whatever rank."""
    ranks, stages, m = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    split = {(s, j): draw(st.booleans()) for s in range(stages) for j in range(m)}
    random = draw(st.randoms(use_true_random=False))
    made: list[list[Action]] = [[] for _ in range(ranks)]
    forwards, backwards, pending = [0] * m, [stages] * m, []
    while True:
        choices = [Action(F, forwards[j], j) for j in range(m) if forwards[j] < stages]
        for j in range(m):
            if forwards[j] == stages and backwards[j] > 0:
                s = backwards[j] - 1
                choices.append(Action(I if split[s, j] else B, s, j))
        choices += pending
        if not choices:
            return one_copy("random", m, placement, made)
        action = random.choice(choices)
        made[placement[action.stage]].append(action)
        if action.kind is F:
            forwards[action.microbatch] += 1
        elif action.kind is W:
            pending.remove(action)
        else:
            backwards[action.microbatch] -= 1
            if action.kind is I:
                pending.append(action._replace(kind=W))


def longest_paths(schedule: PipelineSchedule, times, comm):
    """End of every action by relaxing all edges until nothing moves (Bellman-Ford); slow and obvious."""
    seconds = {F: times.forward, B: times.backward, I: times.input_grad, W: times.weight_grad}
    place = {}
    for rank, actions in enumerate(schedule.actions):
        for i, a in enumerate(actions):
            place["I" if a.kind is B else str(a.kind), a.stage, a.microbatch] = (rank, i)

    def hop(s, target, j):
        return comm[min(s, target)] if schedule.rank_of(s, j) != schedule.rank_of(target, j) else 0.0

    def receiver(rank, a):
        """The other rank that an action sends to, if any."""
        target = a.stage + 1 if a.kind is F else a.stage - 1
        if a.kind is W or not 0 <= target < schedule.stages:
            return None
        other = schedule.rank_of(target, a.microbatch)
        return None if other == rank else other

    starts = dict.fromkeys(place.values(), 0.0)

    def end(node):
        a = schedule.actions[node[0]][node[1]]
        return starts[node] + seconds[a.kind][a.stage]

    def arrival(node):
        """Of what the action sends: the link is busy with what the rank sent over it before."""
        rank, i = node
        a = schedule.actions[rank][i]
        other = receiver(rank, a)
        if other is None:
            return end(node)
        before = [k for k in range(i) if receiver(rank, schedule.actions[rank][k]) == other]
        free = arrival((rank, before[-1])) if before else 0.0
        return max(end(node), free) + hop(a.stage, a.stage + 1 if a.kind is F else a.stage - 1, a.microbatch)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            for i, a in enumerate(actions):
                bounds = [0.0]
                if i:
                    bounds.append(end((rank, i - 1)))
                source = ("F", a.stage - 1, a.microbatch) if a.kind is F else ("I", a.stage + 1, a.microbatch)
                if a.kind is not W and source in place:
                    bounds.append(arrival(place[source]))
                if max(bounds) > starts[rank, i]:
                    starts[rank, i] = max(bounds)
                    moved = True
    return {node: (starts[node], end(node), arrival(node)) for node in starts}


seconds = st.integers(0, 8).map(lambda n: n / 4)


@settings(max_examples=examples(150), deadline=None)
@given(schedule=random_schedules(), data=st.data())
def test_the_simulator_equals_a_longest_path_search(schedule, data):
    verify(schedule)
    per_stage = st.lists(seconds, min_size=schedule.stages, max_size=schedule.stages)
    times = stage_times(*(data.draw(per_stage) for _ in range(3)))
    comm = data.draw(st.lists(seconds, min_size=schedule.stages - 1, max_size=schedule.stages - 1))
    timeline = simulate(schedule, times, comm)
    expected = longest_paths(schedule, times, comm)
    for rank, actions in enumerate(schedule.actions):
        for i in range(len(actions)):
            got = timeline.starts[rank][i], timeline.ends[rank][i], timeline.arrivals[rank][i]
            assert got == pytest.approx(expected[rank, i])


@settings(max_examples=examples(80), deadline=None)
@given(schedule=random_schedules())
def test_peaks_equal_counting_what_is_alive_at_every_instant(schedule):
    timeline = simulate(schedule, equal_stages(schedule.stages, 1.0, 2.0, 1.0))
    spans: dict = {}
    for rank, actions in enumerate(schedule.actions):
        for a, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank]):
            span = spans.setdefault((rank, a.stage, a.microbatch), {})
            if a.kind is not I:
                span["from" if a.kind is F else "until"] = start if a.kind is F else end
    instants = sorted({t for own in timeline.starts for t in own})
    for rank, peak in enumerate(peak_activations(schedule)):
        alive = [0.0]
        for now in instants:
            alive.append(sum(r == rank and span["from"] <= now < span["until"] for (r, _, _), span in spans.items()))
        assert peak == pytest.approx(max(alive))


@settings(max_examples=examples(40), deadline=None)
@given(schedule=random_schedules())
def test_everything_is_released_at_the_end(schedule):
    timeline = simulate(schedule, equal_stages(schedule.stages))
    for steps, peak in zip(live_activations(timeline), peak_activations(schedule)):
        assert not steps or steps[-1][1] == pytest.approx(0.0)
        assert [at for at, _ in steps] == sorted(at for at, _ in steps)
        assert all(held <= peak + 1e-9 for _, held in steps)


def test_messages_overlap_with_passes():
    overlapped = simulate(build("gpipe", 2, 3), equal_stages(2, 1.0, 1.0, 1.0), 0.5)
    assert overlapped.starts[0][:3] == (0.0, 1.0, 2.0)
    assert overlapped.starts[1][0] == 1.5


def test_a_link_carries_one_message_after_the_other():
    timeline = simulate(build("gpipe", 2, 3), equal_stages(2, 1.0, 1.0, 1.0), 5.0)
    assert timeline.ends[0][:3] == (1.0, 2.0, 3.0)
    assert timeline.arrivals[0][:3] == timeline.starts[1][:3] == (6.0, 11.0, 16.0)
    assert timeline.makespan_seconds == 1 + 3 * 5 + 1 + 2 + 3 * 5 + 2  # the gradients' way back is another link


def test_both_directions_of_a_v_share_a_link_with_the_other_chunk():
    """Rank 0 sends rank 1 activations of its first chunk and gradients of its last."""
    timeline = simulate(build("zbv", 2, 6), equal_stages(4, 1.0, 1.0, 1.0), 100.0)
    assert timeline.makespan_seconds > 2 * 6 * 100.0


def test_stages_on_one_rank_send_nothing():
    schedule = build("zbv", 1, 4)
    assert simulate(schedule, equal_stages(2), 10.0).makespan_seconds == 24.0


def test_a_fused_backward_may_take_less():
    times = equal_stages(4, 1.0, 1.0, 1.0, backward=1.5)
    assert simulate(build("1f1b", 4, 8), times).makespan_seconds == pytest.approx((8 + 3) * 2.5)


def test_rates_and_idle_time():
    timeline = simulate(build("1f1b", 4, 8), equal_stages(4))
    assert timeline.bubble_rate == pytest.approx(3 / 11)  # (p-1)/(m+p-1)
    assert timeline.makespan_seconds == timeline.longest_rank_seconds
    assert tuple(timeline.makespan_seconds - busy for busy in timeline.busy) == (9.0,) * 4
    skewed = simulate(build("zb-h2", 4, 8), equal_stages(4))
    assert skewed.bubble_rate == 0.0
    assert 1 - sum(skewed.busy) / 4 / skewed.makespan_seconds == pytest.approx(3 / 27)


def test_uneven_stages_run_at_the_pace_of_the_slowest():
    times = stage_times([1, 1, 3, 1], [1, 1, 3, 1], [1, 1, 3, 1])
    timeline = simulate(build("1f1b", 4, 64), times)
    assert timeline.makespan_seconds == pytest.approx(64 * 9, rel=0.05)
    assert timeline.makespan_seconds - timeline.busy[2] < 20


def test_a_schedule_that_cannot_run_is_reported():
    crossed = [[Action(k, s, j) for j in order for k in (F, B)] for s, order in ((0, (0, 1)), (1, (1, 0)))]
    with pytest.raises(
        InvalidPipelineSchedule, match="deadlock: rank 1 waits before 1F1 for the input of microbatch 1"
    ):
        simulate(one_copy("crossed", 2, (0, 1), crossed), equal_stages(2))


def test_mistakes_in_times():
    schedule = build("1f1b", 2, 2)
    for wrong in (
        lambda: simulate(schedule, equal_stages(3)),
        lambda: simulate(schedule, equal_stages(2), [1.0, 1.0]),
        lambda: simulate(schedule, equal_stages(2), -1.0),
        lambda: equal_stages(2, -1.0),
        lambda: stage_times([1.0], [1.0, 2.0], [1.0]),
    ):
        with pytest.raises(SpecError):
            wrong()


def test_an_action_takes_a_few_calls():
    schedule, times = build("zb-h1", 64, 512), equal_stages(64)
    actions = sum(map(len, schedule.actions))
    assert actions == 64 * 512 * 3
    assert calls_of(lambda: simulate(schedule, times, 0.01)) < 10 * actions
