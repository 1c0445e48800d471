"""What the runtime is given: our passes in our order, messages that match, and PyTorch's own lists beside them."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from shardwise.engine.pipeline.runtime import require_runnable, runtime_actions
from shardwise.pipeline import PipelineSchedule, build
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import job_schedules

SCHEDULES = job_schedules()

RUN = tuple(name for name in SCHEDULES if name != "dualpipe")
RECEIVES = {
    _ComputationType.SEND_F: (1, _ComputationType.RECV_F),
    _ComputationType.SEND_B: (-1, _ComputationType.RECV_B),
}


def schedules(name: str) -> list[PipelineSchedule]:
    """Of 2 to 4 ranks and up to 12 microbatches, fewer than stages too; interleaving takes multiples of the ranks."""
    found = []
    for ranks, microbatches in product((2, 3, 4), range(1, 13)):
        for chunks in (2, 3) if name == "interleaved" else (None,):
            if name != "interleaved" or microbatches % ranks == 0:
                found.append(build(name, ranks, microbatches, chunks))
    return found


def passes(actions: list[_Action]) -> list[str]:
    return [str(action) for action in actions if action.is_compute_op]


def run_with_blocking_messages(lists: dict[int, list[_Action]], schedule: PipelineSchedule) -> None:
    """Every send and every receive waits for the other: the strictest network there can be."""
    place, received = dict.fromkeys(lists, 0), {rank: set[_Action]() for rank in lists}

    def current(rank: int) -> _Action | None:
        return lists[rank][place[rank]] if place[rank] < len(lists[rank]) else None

    while any(current(rank) for rank in lists):
        moved = False
        for rank in lists:
            action = current(rank)
            if action is None or action.computation_type in (_ComputationType.RECV_F, _ComputationType.RECV_B):
                continue
            if action.computation_type in RECEIVES:
                step, kind = RECEIVES[action.computation_type]
                receive = _Action(action.stage_index + step, kind, action.microbatch_index)
                peer = schedule.placement[receive.stage_index]
                if current(peer) != receive:
                    continue
                received[peer].add(receive)
                place[peer] += 1
            elif action.is_compute_op:  # the rest waits for sends that have met their receives (PyTorch 2.15)
                require_message(action, received[rank], schedule, rank)
            place[rank] += 1
            moved = True
        assert moved, f"{schedule.name} deadlocks at {[str(current(rank)) for rank in lists]}"


def require_message(action: _Action, received: set[_Action], schedule: PipelineSchedule, rank: int) -> None:
    forward = action.computation_type is _ComputationType.FORWARD
    if action.computation_type is _ComputationType.BACKWARD_WEIGHT:
        return
    source = action.stage_index + (-1 if forward else 1)
    if 0 <= source < schedule.stages and schedule.placement[source] != rank:
        kind = _ComputationType.RECV_F if forward else _ComputationType.RECV_B
        assert _Action(action.stage_index, kind, action.microbatch_index) in received


@pytest.mark.parametrize("name", RUN)
def test_the_order_is_ours_and_nobody_waits_for_ever(name: str) -> None:
    for schedule in schedules(name):
        lists = runtime_actions(schedule)
        for rank, ours in enumerate(schedule.actions):
            assert passes(lists[rank]) == [str(action) for action in ours]
        run_with_blocking_messages(lists, schedule)
        forwards = runtime_actions(schedule, backward=False)
        assert all("B" not in str(action) for actions in forwards.values() for action in actions)
        run_with_blocking_messages(forwards, schedule)


def test_two_copies_are_refused_with_the_remedy() -> None:
    with pytest.raises(SpecError) as raised:
        require_runnable("dualpipe")
    assert raised.value.field == "strategy.schedule" and "dualpipev" in str(raised.value)
    with pytest.raises(SpecError):
        runtime_actions(build("dualpipe", 2, 4))


def of_pytorch(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """Passes of the schedule that PyTorch ships; two that it overlaps stand one after the other."""
    lists = get_schedule_ops(name, ranks, microbatches, chunks)
    return [
        [
            str(one)
            for action in actions
            if action
            for one in action.sub_actions or (action,)
            if "REDUCE" not in str(one)
        ]
        for actions in lists
    ]


def ours(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in build(name, ranks, microbatches, chunks).actions]


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_the_same_lists_as_pytorch(ranks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 3 * ranks, 12):
        assert ours("gpipe", ranks, microbatches) == of_pytorch("GPipe", ranks, microbatches, 1)
        for chunks in (2, 3):
            theirs = of_pytorch("Interleaved1F1B", ranks, microbatches, chunks)
            assert ours("interleaved", ranks, microbatches, chunks) == theirs
    for microbatches in (2 * ranks, 2 * ranks + 1, 12):  # PyTorch takes no fewer than stages, we do
        assert ours("dualpipev", ranks, microbatches) == of_pytorch("DualPipeV", ranks, microbatches, 2)


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_1f1b_differs_in_the_numbers_that_pytorch_prints(ranks: int) -> None:
    """On the last rank its printed list counts forwards from 1, up to one that does not exist; it runs others."""
    for microbatches in (ranks, 2 * ranks + 1, 12):
        mine, theirs = ours("1f1b", ranks, microbatches), of_pytorch("1F1B", ranks, microbatches, 1)
        assert mine[:-1] == theirs[:-1]
        last = ranks - 1
        shifted = [f"{last}F{int(one.split('F')[1]) + 1}" if "F" in one else one for one in mine[last]]
        assert shifted == theirs[last]


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_zbv_differs_in_where_weight_gradients_wait(ranks: int) -> None:
    """Forwards and input gradients agree. While the pipeline runs empty, ours lets weight gradients wait longer, to
    fill what PyTorch leaves idle; none comes earlier, so that no more activations are held than its memory limit."""

    def placed(actions: list[str]) -> dict[str, int]:
        """How many other passes precede each weight gradient."""
        return {one: sum("W" not in other for other in actions[:at]) for at, one in enumerate(actions) if "W" in one}

    for microbatches in (ranks, 2 * ranks - 1, 2 * ranks, 12):
        for mine, theirs in zip(ours("zbv", ranks, microbatches), of_pytorch("ZBVZeroBubble", ranks, microbatches, 2)):
            assert [one for one in mine if "W" not in one] == [one for one in theirs if "W" not in one]
            before, after = placed(theirs), placed(mine)
            assert before.keys() == after.keys() and all(after[one] >= before[one] for one in before)
