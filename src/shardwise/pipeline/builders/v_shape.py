"""ZB-V, V-Half and V-Min: two chunks per rank, stage r on the way down and stage 2p-1-r on the way back.

Forwards and input gradients have a fixed order; weight gradients fill the waits within a memory limit.
ZB-V: Qi et al. 2023, arXiv 2401.10241, appendix. V-Half, V-Min: Qi et al. 2024, arXiv 2405.15362, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.pipeline.builders.zero_bubble import fill_weight_gradients
from shardwise.pipeline.forms import ClosedForms, EqualStages, in_round_trips, paced_by_messages
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, StageTimes, equal_stages, v_placement
from shardwise.spec.schedules import schedule_record

F, I = ActionKind.F, ActionKind.I  # noqa: E741


def _filled(
    name: str,
    order: Callable[[int, int, int], list[Action]],  # of ranks, rank and microbatches
    chunks_held: Callable[[int], int],  # of ranks
    ranks: int,
    microbatches: int,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
) -> PipelineSchedule:
    orders = [order(ranks, rank, microbatches) for rank in range(ranks)]
    known, limits = times or equal_stages(2 * ranks), [chunks_held(ranks)] * ranks
    return fill_weight_gradients(name, v_placement(ranks), microbatches, orders, limits, known, comm_seconds)


def _zbv_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Fills the way down, then the way back, then one forward and one backward of each in turn."""
    down, back = rank, 2 * ranks - 1 - rank
    warmup = [(F, down)] * (2 * (ranks - rank) - 1) + [(F, back), (F, down)] * rank
    warmup += [(F, back), (I, back)] * (ranks - rank)

    def endless() -> Iterator[tuple[ActionKind, int]]:
        yield from warmup
        while True:
            yield from ((F, down), (I, down), (F, back), (I, back))

    order: list[Action] = []
    done = dict.fromkeys(((F, down), (F, back), (I, down), (I, back)), 0)
    for kind, stage in endless():
        if done[kind, stage] < microbatches:
            order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1
        if len(order) == 4 * microbatches:
            break
    return order


def _half_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    # Building block of 2405.15362: a rank's offset is 2 on the way down and 1 back; even p needs a shift of 3
    # so that blocks, repeated every 6 units, never collide.
    p, shift = ranks, 0 if ranks % 2 else 3
    starts = (2 * rank, 3 * p - rank - 2, 3 * p + shift + 2 * rank - 1, 6 * p + shift - rank - 2)
    return _repeated(ranks, rank, microbatches, starts)


def _min_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    # As above with offsets of 1 both ways; a shift of 2 where 3 divides p.
    p, shift = ranks, 0 if ranks % 3 else 2
    starts = (rank, 2 * p - rank - 1, 2 * p + shift + rank, 4 * p + shift - rank - 1)
    return _repeated(ranks, rank, microbatches, starts)


def _repeated(ranks: int, rank: int, microbatches: int, starts: tuple[int, int, int, int]) -> list[Action]:
    """The four actions of the block, repeated for each microbatch every 6 units (2 chunks of F, I and W)."""
    down, back = rank, 2 * ranks - 1 - rank
    block = list(zip(starts, ((F, down), (F, back), (I, back), (I, down))))
    timed = [(start + 6 * j, Action(*what, j)) for j in range(microbatches) for start, what in block]
    return [action for _, action in sorted(timed)]


# No bubble for F = I = W and m >= 2p-1, with the 2p chunks of memory that 1F1B has.
zbv = partial(_filled, "zbv", _zbv_order, lambda p: 2 * p)
# (p+2)//2 microbatches of two chunks in memory: half of 1F1B.
v_half = partial(_filled, "v-half", _half_order, lambda p: 2 * ((p + 2) // 2))
# (p+4)//3 microbatches of two chunks in memory: a third of 1F1B.
v_min = partial(_filled, "v-min", _min_order, lambda p: 2 * ((p + 4) // 3))


# Bubbles: exact for F = I = W and c = 0, else read off the simulator; W <= F, W <= I and short messages are assumed.


def _zbv_bubble(case: EqualStages) -> Any:
    """0 for F = I = W (Qi et al. 2023); with fewer microbatches than 2p-1 the pipeline never fills."""
    p, m = case.p, case.m
    unfilled = maximum(0, maximum(2 * p - 1 - m, 4 * (p - m) - 1)) * (p > 1)
    return unfilled * (case.F + case.I + case.W) / 3 + _zbv_waits(case)


def _zbv_waits(case: EqualStages) -> Any:
    """Idle seconds of the first rank in a full pipeline."""
    F, I, W = case.F, case.I, case.W  # noqa: E741
    uneven = maximum(maximum(F, I), W) - minimum(minimum(F, I), W)
    return (case.p - 1) * (2 * uneven + 6 * case.c)


def _zbv_last_end(case: EqualStages) -> Any:
    """In a full pipeline every rank ends two weight gradients, less an input gradient and a message, after the last."""
    return _zbv_waits(case) + (case.p - 1) * maximum(0.0, 2 * case.W - case.I - case.c)


def _half_bubble(case: EqualStages) -> Any:
    """Half of 1F1B's 6(p-1) units (Qi et al. 2024), one unit less for odd p."""
    p, F, I = case.p, case.F, case.I  # noqa: E741
    filling = (3 * (p - 1) - p % 2) * maximum(F, I) + (p + 1) * (minimum(F, I) - case.W)
    return (p > 1) * (filling + (2 * case.m + 5 * p - 8) * case.c)


def _min_bubble(case: EqualStages) -> Any:
    """Two thirds of 1F1B's (Qi et al. 2024): 4(p-1) units, one less, or one more where 3 divides p.

    Its steady state is six times the longest pass.
    """
    p, m = case.p, case.m
    longest = maximum(maximum(case.F, case.I), case.W)
    filling = (4 * (p - 1) + 2 * (p % 3 == 0) - 1) * longest
    steady = m * (6 * longest - 2 * (case.F + case.I + case.W))
    return (p > 1) * (filling + steady + (6 * (p - 1) / p * m + 3 * (p - 2)) * case.c)


def _half_pace(case: EqualStages) -> Any:
    """Of the p + 2 that it holds, p are in flight: read off the simulator."""
    held = 2 * case.p * (case.F + case.I) + 4 * (case.p - 1) * case.c
    return paced_by_messages(case, schedule_record("v-half"), in_round_trips(case, case.p, held))


# Chunks in flight: the limit, or if that is less all m of the way down and ``ahead`` of the way back. Read off the
# built schedules, and equal to them for every p up to 44 (`tests/pipeline/test_closed_forms.py`).


def _half_in_flight(p: int, m: int, v: int, r: int) -> int:
    ahead = (r + 1) // 2 + 1 if p % 2 else r // 2 + 2 - (r == 0)
    return min(2 * m, m + ahead, 2 * ((p + 2) // 2))


def _min_in_flight(p: int, m: int, v: int, r: int) -> int:
    # Where p = 2 mod 3 the limit is not tight on every third rank.
    slack = 0 if p % 3 != 2 or r % 3 else 2 - (r == 0)
    if p % 3 == 0:
        ahead = (r + 2) // 3 + 1 - (r == 1)
    else:
        ahead = (r + 1) // 3 + 1 + (p % 3 == 2 and r % 3 == 1 and r + 3 * m >= 2 * p + 3)
    return min(2 * m, m + ahead, 2 * ((p + 4) // 3) - slack)


ZBV_FORMS = ClosedForms(
    bubble=_zbv_bubble,
    in_flight=lambda p, m, v, r: min(2 * m, 2 * p),
    is_exact=lambda case: case.is_even,
    last_end=_zbv_last_end,
)
HALF_FORMS = ClosedForms(
    bubble=_half_bubble,
    in_flight=_half_in_flight,
    is_exact=lambda case: case.is_even and bool(case.m > case.p // 2),
    pace=_half_pace,
)
MIN_FORMS = ClosedForms(
    bubble=_min_bubble, in_flight=_min_in_flight, is_exact=lambda case: case.is_even and bool(case.m > 1)
)
