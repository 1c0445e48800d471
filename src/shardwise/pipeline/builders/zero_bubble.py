"""ZB-H1 and ZB-H2: 1F1B with the backward split, weight gradients late enough to fill the tail.

Qi et al. 2023, arXiv 2401.10241, section 2. Rank r keeps ``in_flight`` microbatches between forward and input
gradient and lets ``lag`` weight gradients wait, so that every rank holds the same number of activations:
H1 (p-r) + r = p, H2 (2(p-r)-1) + 2r = 2p-1.
"""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.pipeline.builders.one_f_one_b import one_forward_one_backward
from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.message_pace import one_f_one_b_wait
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy


def zb_h1(ranks: int, microbatches: int) -> PipelineSchedule:
    actions = [_split(rank, microbatches, in_flight=ranks - rank, lag=rank) for rank in range(ranks)]
    return one_copy("zb-h1", microbatches, loop_placement(ranks), actions)


def zb_h2(ranks: int, microbatches: int) -> PipelineSchedule:
    actions = [_split(rank, microbatches, in_flight=2 * (ranks - rank) - 1, lag=2 * rank) for rank in range(ranks)]
    return one_copy("zb-h2", microbatches, loop_placement(ranks), actions)


def _split(stage: int, microbatches: int, in_flight: int, lag: int) -> list[Action]:
    """The weight gradient of microbatch j follows the input gradient of j + lag; the last ones come at the end."""
    order: list[Action] = []
    for action in one_forward_one_backward(stage, microbatches, in_flight, ActionKind.I):
        order.append(action)
        if action.kind is ActionKind.I and action.microbatch >= lag:
            order.append(Action(ActionKind.W, stage, action.microbatch - lag))
    left = range(max(0, microbatches - lag), microbatches)
    return order + [Action(ActionKind.W, stage, j) for j in left]


def h1_bubble(case: EqualStages) -> Any:
    """(p-1)(F+I-W): Qi et al. 2023, section 2.2; needs m >= p and W <= F, else as here."""
    p, m, F, I, W, c = case.p, case.m, case.F, case.I, case.W, case.c  # noqa: E741
    waits = minimum(one_f_one_b_wait(p, m, F + I, c), 4 * (p - 1) * c)
    return (p - 1) * (F + I) - minimum(m - 1, p - 1) * minimum(W, F) + waits


def h2_bubble(case: EqualStages) -> Any:
    """(p-1)(F+I-2W): Qi et al. 2023, section 2.2; fewer microbatches fill less."""
    return deferred_bubble(case, 2 * (case.p - 1))


def deferred_bubble(case: EqualStages, waiting: Any) -> Any:
    """The round trip of the first microbatch, filled by as many weight gradients as may wait."""
    hops = case.p - 1
    filled = minimum(case.m - 1, waiting) * case.W
    return maximum(0.0, hops * (case.F + case.I) - filled) + 2 * hops * case.c


def h1_pace(case: EqualStages) -> Any:
    """That of 1F1B, and the weight gradients, but for the last, in the waits."""
    there_and_back = case.F + case.I
    waits = one_f_one_b_wait(case.p, case.m, there_and_back, case.c)
    return (case.m + case.p - 1) * there_and_back + case.W + waits


def _few_messages(case: EqualStages) -> bool:
    return bool(case.c == 0 or 2 * case.p * case.c <= case.W)


def _h1_is_exact(case: EqualStages) -> bool:
    return _few_messages(case) and bool(case.W <= case.F or (case.m >= case.p and case.c == 0))


def _h2_is_exact(case: EqualStages) -> bool:
    fills = 2 * case.W <= case.F + case.I or (case.m >= 2 * case.p - 1 and case.c == 0)
    return _few_messages(case) and bool(case.W <= case.F and fills)


# p on every rank, r of them waiting for their weight gradient.
H1_FORMS = ClosedForms(bubble=h1_bubble, in_flight=lambda p, m, v, r: min(m, p), is_exact=_h1_is_exact, pace=h1_pace)
H2_FORMS = ClosedForms(bubble=h2_bubble, in_flight=lambda p, m, v, r: min(m, 2 * p - 1), is_exact=_h2_is_exact)
