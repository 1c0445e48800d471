"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    kinds = (ActionKind.F, ActionKind.B)
    actions = [[Action(kind, rank, j) for kind in kinds for j in range(microbatches)] for rank in range(ranks)]
    return one_copy("gpipe", microbatches, loop_placement(ranks), actions)


def _bubble(case: EqualStages) -> Any:
    """(p-1)(F+B): Narayanan et al. 2021, section 2.2.1; a message per hop, there and back.

    Each way, all follow each other at the pace of the pass or of the message, whichever is slower.
    """
    p, backward, c = case.p, case.I + case.W, case.c
    queue = maximum(0.0, c - case.F) + maximum(0.0, c - backward)
    return (p - 1) * (case.F + backward + 2 * c) + (case.m - 1) * queue * (p > 1)


FORMS = ClosedForms(bubble=_bubble, in_flight=lambda p, m, v, r: m, is_exact=lambda case: True, any_messages=True)
