"""ZB-H1 and ZB-H2: 1F1B with the backward split, weight gradients late enough to fill the tail.

Qi et al. 2023, arXiv 2401.10241, section 2. Rank r keeps ``in_flight`` microbatches between forward and input
gradient and lets ``lag`` weight gradients wait, so that every rank holds the same number of activations:
H1 (p-r) + r = p, H2 (2(p-r)-1) + 2r = 2p-1.
"""

from __future__ import annotations

from shardwise.pipeline.builders.one_f_one_b import one_forward_one_backward
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
