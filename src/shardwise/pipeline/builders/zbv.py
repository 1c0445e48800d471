"""ZB-V: two chunks per rank, stage r on the way down and stage 2p-1-r on the way back, in the memory of 1F1B.

Forwards and input gradients have a fixed order; weight gradients fill the waits within the memory limit
(Qi et al. 2023, arXiv 2401.10241, appendix).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.pipeline.builders.zero_bubble import fill_weight_gradients
from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, StageTimes, equal_stages, v_placement

F, I = ActionKind.F, ActionKind.I  # noqa: E741


def zbv(ranks: int, microbatches: int, times: StageTimes | None = None, comm_seconds: float = 0.0) -> PipelineSchedule:
    """No bubble for F = I = W and m >= 2p-1, with the 2p chunks of memory that 1F1B has."""
    orders = [_order(ranks, rank, microbatches) for rank in range(ranks)]
    known, limits = times or equal_stages(2 * ranks), [2 * ranks] * ranks
    return fill_weight_gradients("zbv", v_placement(ranks), microbatches, orders, limits, known, comm_seconds)


def _order(ranks: int, rank: int, microbatches: int) -> list[Action]:
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


# Exact for F = I = W and c = 0, otherwise fitted to the simulator; W <= F, W <= I and short messages are assumed.


def _bubble(case: EqualStages) -> Any:
    """0 for F = I = W (Qi et al. 2023); with fewer microbatches than 2p-1 the pipeline never fills."""
    p, m = case.p, case.m
    unfilled = maximum(0, maximum(2 * p - 1 - m, 4 * (p - m) - 1)) * (p > 1)
    return unfilled * (case.F + case.I + case.W) / 3 + _waits(case)


def _waits(case: EqualStages) -> Any:
    """Idle seconds of the first rank in a full pipeline."""
    F, I, W = case.F, case.I, case.W  # noqa: E741
    uneven = maximum(maximum(F, I), W) - minimum(minimum(F, I), W)
    return (case.p - 1) * (2 * uneven + 6 * case.c)


def _last_end(case: EqualStages) -> Any:
    """In a full pipeline each rank ends later than the one before, by two weight gradients less an input gradient and a
    message."""
    return _waits(case) + (case.p - 1) * maximum(0.0, 2 * case.W - case.I - case.c)


FORMS = ClosedForms(
    bubble=_bubble,
    in_flight=lambda p, m, v, r: min(2 * m, 2 * p),
    is_exact=lambda case: case.is_even,
    last_end=_last_end,
    text="max(0, 2·p−1−m, 4·(p−m)−1)/(6·m)",
)
