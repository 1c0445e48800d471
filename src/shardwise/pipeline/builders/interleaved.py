"""Interleaved 1F1B: v chunks per rank, microbatches in groups of p through chunk after chunk.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the order is Megatron-LM's.
"""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.message_pace import in_round_trips, messages_per_link
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


def _bubble(case: EqualStages) -> Any:
    """(p-1)(F+B)/v of a whole rank: Narayanan et al. 2021, section 2.2.2; every boundary once each way."""
    p, v = case.p, case.v
    return (p - 1) * (case.F + case.I + case.W) + 2 * (p * v - 1) * (p > 1) * case.c


def _pace(case: EqualStages) -> Any:
    """Whole backwards; the last rank sends to the first between two chunks.

    p microbatches make each round trip together, one message apart.
    """
    p, m, v, c = case.p, case.m, case.v, case.c
    there_and_back = case.F + (case.I + case.W)
    first_round_trip = p * v * there_and_back + 2 * (p * v - 1) * c
    by_links = ((m - p) * messages_per_link("interleaved", p, v) + p - 1) * c
    held = v * (v + 1) * p / 2 * there_and_back + (v * (v + 1) * p - 2 * v) * c
    return first_round_trip + maximum(by_links, in_round_trips(case, (v + 1) * p - 1, held))


FORMS = ClosedForms(
    bubble=_bubble,
    in_flight=lambda p, m, v, r: min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
    is_exact=lambda case: bool(case.c <= min(case.F, case.I, case.W)),
    pace=_pace,
)
