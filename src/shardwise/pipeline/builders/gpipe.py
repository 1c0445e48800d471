"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    kinds = (ActionKind.F, ActionKind.B)
    actions = [[Action(kind, rank, j) for kind in kinds for j in range(microbatches)] for rank in range(ranks)]
    return one_copy("gpipe", microbatches, loop_placement(ranks), actions)
