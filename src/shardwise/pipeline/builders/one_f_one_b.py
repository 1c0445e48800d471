"""1F1B: forwards until the pipeline is full, then one backward for every forward (PipeDream-Flush).

Narayanan et al. 2021, arXiv 2006.09503 and 2104.04473 section 2.2.
"""

from __future__ import annotations

from typing import Any

from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.message_pace import one_f_one_b_wait
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    actions = [one_forward_one_backward(rank, microbatches, ranks - rank) for rank in range(ranks)]
    return one_copy("1f1b", microbatches, loop_placement(ranks), actions)


def one_forward_one_backward(
    stage: int, microbatches: int, in_flight: int, backward: ActionKind = ActionKind.B
) -> list[Action]:
    """``in_flight`` forwards ahead, then a backward and a forward in turn, then the backwards that are left."""
    ahead = min(in_flight, microbatches)
    order = [Action(ActionKind.F, stage, j) for j in range(ahead)]
    for j in range(microbatches):
        order.append(Action(backward, stage, j))
        if j + ahead < microbatches:
            order.append(Action(ActionKind.F, stage, j + ahead))
    return order


def _bubble(case: EqualStages) -> Any:
    """GPipe's; besides, p in flight make every later microbatch pay (p-1)/p of a round trip of messages."""
    passes = case.F + case.I + case.W
    return (case.p - 1) * passes + one_f_one_b_wait(case.p, case.m, passes, case.c)


FORMS = ClosedForms(
    bubble=_bubble, in_flight=lambda p, m, v, r: min(m, p - r), is_exact=lambda case: True, any_messages=True
)
