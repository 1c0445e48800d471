"""Schedules with undivided backward passes that drain at the end of a step: sequential, GPipe, (interleaved) 1F1B."""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.forms import ClosedForms, EqualStages, in_round_trips, messages_per_link, one_f_one_b_wait
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, loop_placement, one_copy
from shardwise.spec.errors import SpecError

# -- One microbatch at a time through the whole pipeline: naive model parallelism, one rank busy at a time


def sequential(ranks: int, microbatches: int) -> PipelineSchedule:
    """A microbatch enters when the one before has left: the first rank runs its backward before the next forward."""
    kinds = (ActionKind.F, ActionKind.B)
    actions = [[Action(kind, rank, j) for j in range(microbatches) for kind in kinds] for rank in range(ranks)]
    return one_copy("sequential", microbatches, loop_placement(ranks), actions)


def _sequential_bubble(case: EqualStages) -> Any:
    """Every rank waits for all others, for every microbatch."""
    return case.m * (case.p - 1) * (case.F + case.I + case.W + 2 * case.c)


SEQUENTIAL_FORMS = ClosedForms(
    bubble=_sequential_bubble, in_flight=lambda p, m, v, r: 1, is_exact=lambda case: True, any_messages=True
)


# -- GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965) -------------------


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    kinds = (ActionKind.F, ActionKind.B)
    actions = [[Action(kind, rank, j) for kind in kinds for j in range(microbatches)] for rank in range(ranks)]
    return one_copy("gpipe", microbatches, loop_placement(ranks), actions)


def _gpipe_bubble(case: EqualStages) -> Any:
    """(p-1)(F+B): Narayanan et al. 2021, section 2.2.1; and a message per hop, there and back.

    On each way microbatches follow each other at the pace of the pass or of the message, whichever is slower.
    """
    p, backward, c = case.p, case.I + case.W, case.c
    queue = maximum(0.0, c - case.F) + maximum(0.0, c - backward)
    return (p - 1) * (case.F + backward + 2 * c) + (case.m - 1) * queue * (p > 1)


GPIPE_FORMS = ClosedForms(
    bubble=_gpipe_bubble,
    in_flight=lambda p, m, v, r: m,
    is_exact=lambda case: True,
    any_messages=True,
    text="(p−1)/m",
)


# -- 1F1B: forwards until the pipeline is full, then one backward for every forward (PipeDream-Flush)
# Narayanan et al. 2021, arXiv 2006.09503 and 2104.04473 section 2.2.


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    actions = [one_forward_one_backward(rank, microbatches, ranks - rank) for rank in range(ranks)]
    return one_copy("1f1b", microbatches, loop_placement(ranks), actions)


def one_forward_one_backward(
    stage: int, microbatches: int, in_flight: int, backward: ActionKind = ActionKind.B
) -> list[Action]:
    """``in_flight`` forwards, then backwards and forwards alternating, then the remaining backwards."""
    ahead = min(in_flight, microbatches)
    order = [Action(ActionKind.F, stage, j) for j in range(ahead)]
    for j in range(microbatches):
        order.append(Action(backward, stage, j))
        if j + ahead < microbatches:
            order.append(Action(ActionKind.F, stage, j + ahead))
    return order


def _one_f_one_b_bubble(case: EqualStages) -> Any:
    """As GPipe; in addition, with p in flight, every later microbatch pays (p-1)/p of a round trip of messages."""
    passes = case.F + case.I + case.W
    return (case.p - 1) * passes + one_f_one_b_wait(case.p, case.m, passes, case.c)


ONE_F_ONE_B_FORMS = ClosedForms(
    bubble=_one_f_one_b_bubble,
    in_flight=lambda p, m, v, r: min(m, p - r),
    is_exact=lambda case: True,
    any_messages=True,
    text="(p−1)/m",
)


# -- Interleaved 1F1B: v chunks per rank, microbatches in groups of p through chunk after chunk ------
# Narayanan et al. 2021, arXiv 2104.04473, section 2.2; the order is Megatron-LM's.


def interleaved(ranks: int, microbatches: int, chunks: int, ahead: int = 0) -> PipelineSchedule:
    if microbatches % ranks:
        raise SpecError(
            "microbatches",
            f"{microbatches} is not a multiple of the {ranks} pipeline ranks, which interleaving needs",
            f"use {_near_multiples(microbatches, ranks)} microbatches, or schedule 1f1b",
        )
    actions = [_rank_actions(rank, ranks, microbatches, chunks, ahead) for rank in range(ranks)]
    return one_copy("interleaved", microbatches, loop_placement(ranks, chunks), actions)


def _near_multiples(microbatches: int, ranks: int) -> str:
    below = microbatches // ranks * ranks
    return f"{below} or {below + ranks}" if below else str(ranks)


def _rank_actions(rank: int, ranks: int, microbatches: int, chunks: int, more: int) -> list[Action]:
    total = microbatches * chunks
    # Forwards ahead of the first backward: 2(p-r-1) + (v-1)p + 1 (Megatron-LM, schedules.py), and ``more``.
    ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 + more)
    forwards = [_nth(ActionKind.F, rank, ranks, chunks, i) for i in range(total)]
    backwards = [_nth(ActionKind.B, rank, ranks, chunks, i) for i in range(total)]
    order = forwards[:ahead]
    for i, backward in enumerate(backwards):
        order.append(backward)
        order += forwards[ahead + i : ahead + i + 1]
    return order


def _nth(kind: ActionKind, rank: int, ranks: int, chunks: int, index: int) -> Action:
    """The index-th forward or backward of a rank: p microbatches on one chunk, then p on the next; backwards go from
    the last chunk to the first."""
    group, inside = divmod(index, ranks * chunks)
    chunk, microbatch = divmod(inside, ranks)
    if kind is not ActionKind.F:
        chunk = chunks - 1 - chunk
    return Action(kind, chunk * ranks + rank, group * ranks + microbatch)


def _interleaved_bubble(case: EqualStages) -> Any:
    """(p-1)(F+B)/v in times of a whole rank: Narayanan et al. 2021, section 2.2.2; and messages over every boundary,
    once each way."""
    p, v = case.p, case.v
    return (p - 1) * (case.F + case.I + case.W) + 2 * (p * v - 1) * (p > 1) * case.c


def _interleaved_pace(case: EqualStages) -> Any:
    """p microbatches make each round trip together, one message apart; between chunks the last rank sends to the
    first."""
    p, m, v, c = case.p, case.m, case.v, case.c
    there_and_back = case.F + (case.I + case.W)
    first_round_trip = p * v * there_and_back + 2 * (p * v - 1) * c
    by_links = ((m - p) * messages_per_link("interleaved", p, v) + p - 1) * c
    held = v * (v + 1) * p / 2 * there_and_back + (v * (v + 1) * p - 2 * v) * c
    return first_round_trip + maximum(by_links, in_round_trips(case, (v + 1) * p - 1, held))


INTERLEAVED_FORMS = ClosedForms(
    bubble=_interleaved_bubble,
    in_flight=lambda p, m, v, r: min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
    is_exact=lambda case: bool(case.c <= min(case.F, case.I, case.W)),
    pace=_interleaved_pace,
    text="(p−1)/(v·m)",
)
