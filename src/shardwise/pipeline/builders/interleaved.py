"""Interleaved 1F1B: v chunks per rank, microbatches in groups of p through chunk after chunk.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the order is Megatron-LM's.
"""

from __future__ import annotations

from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy
from shardwise.spec.errors import SpecError


def interleaved(ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    if microbatches % ranks:
        raise SpecError(
            "microbatches",
            f"{microbatches} is not a multiple of the {ranks} pipeline ranks, which interleaving needs",
            f"use {_near_multiples(microbatches, ranks)} microbatches, or schedule 1f1b",
        )
    actions = [_rank_actions(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    return one_copy("interleaved", microbatches, loop_placement(ranks, chunks), actions)


def _near_multiples(microbatches: int, ranks: int) -> str:
    below = microbatches // ranks * ranks
    return f"{below} or {below + ranks}" if below else str(ranks)


def _rank_actions(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    total = microbatches * chunks
    # Forwards ahead of the first backward: 2(p-r-1) + (v-1)p for the way there, and one to turn back
    # (Megatron-LM, schedules.py).
    ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)
    forwards = [_nth(ActionKind.F, rank, ranks, chunks, i) for i in range(total)]
    backwards = [_nth(ActionKind.B, rank, ranks, chunks, i) for i in range(total)]
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order.append(backward)
        order += forwards[ahead + i : ahead + i + 1]
    return order


def _nth(kind: ActionKind, rank: int, ranks: int, chunks: int, index: int) -> Action:
    """The index-th forward (backward) of a rank: p microbatches on one chunk, then on the next (the one before)."""
    group, inside = divmod(index, ranks * chunks)
    chunk, microbatch = divmod(inside, ranks)
    if kind is not ActionKind.F:
        chunk = chunks - 1 - chunk
    return Action(kind, chunk * ranks + rank, group * ranks + microbatch)
