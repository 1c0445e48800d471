"""One microbatch at a time through the whole pipeline: naive model parallelism, one rank works at any time."""

from __future__ import annotations

from typing import Any

from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy


def sequential(ranks: int, microbatches: int) -> PipelineSchedule:
    """Forward, then backward of every microbatch; the next one enters when the last is out.

    The first rank starts no forward before its last backward, and so the others have nothing to start.
    """
    kinds = (ActionKind.F, ActionKind.B)
    actions = [[Action(kind, rank, j) for j in range(microbatches) for kind in kinds] for rank in range(ranks)]
    return one_copy("sequential", microbatches, loop_placement(ranks), actions)


def _bubble(case: EqualStages) -> Any:
    """Every other rank's work of every microbatch is waited for."""
    return case.m * (case.p - 1) * (case.F + case.I + case.W + 2 * case.c)


FORMS = ClosedForms(bubble=_bubble, in_flight=lambda p, m, v, r: 1, is_exact=lambda case: True, any_messages=True)
