"""ZB-V, V-Half and V-Min: two chunks per rank, stage r on the way down and stage 2p-1-r on the way back.

The forwards and input gradients have a fixed order; weight gradients fill the waits under a memory limit.
ZB-V: Qi et al. 2023, arXiv 2401.10241, appendix. V-Half, V-Min: Qi et al. 2024, arXiv 2405.15362, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.pipeline.builders.fill import fill_weight_gradients
from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule, v_placement
from shardwise.pipeline.times import StageTimes, equal_stages

F, I = ActionKind.F, ActionKind.I  # noqa: E741
Order = Callable[[int, int, int], list[Action]]  # of (ranks, rank, microbatches)


def zbv(ranks: int, microbatches: int, times: StageTimes | None = None, comm_seconds: float = 0.0) -> PipelineSchedule:
    """No bubble for F = I = W and m >= 2p-1, with the 2p chunks of memory that 1F1B has."""
    return _filled("zbv", _zbv_order, 2 * ranks, ranks, microbatches, times, comm_seconds)


def v_half(
    ranks: int, microbatches: int, times: StageTimes | None = None, comm_seconds: float = 0.0
) -> PipelineSchedule:
    """(p+2)//2 microbatches of two chunks in memory: half of 1F1B."""
    return _filled("v-half", _half_order, 2 * ((ranks + 2) // 2), ranks, microbatches, times, comm_seconds)


def v_min(
    ranks: int, microbatches: int, times: StageTimes | None = None, comm_seconds: float = 0.0
) -> PipelineSchedule:
    """(p+4)//3 microbatches of two chunks in memory: a third of 1F1B."""
    return _filled("v-min", _min_order, 2 * ((ranks + 4) // 3), ranks, microbatches, times, comm_seconds)


def _filled(
    name: str, order: Order, limit: int, ranks: int, microbatches: int, times: StageTimes | None, comm_seconds: float
) -> PipelineSchedule:
    orders = [order(ranks, rank, microbatches) for rank in range(ranks)]
    known = times or equal_stages(2 * ranks)
    return fill_weight_gradients(name, v_placement(ranks), microbatches, orders, [limit] * ranks, known, comm_seconds)


def _zbv_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Fill the way down, then the way back, then one forward and one backward of each in turn."""
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
    # so that two blocks, repeated every 6 units, never meet.
    p, shift = ranks, 0 if ranks % 2 else 3
    starts = (2 * rank, 3 * p - rank - 2, 3 * p + shift + 2 * rank - 1, 6 * p + shift - rank - 2)
    return _repeated(ranks, rank, microbatches, starts)


def _min_order(ranks: int, rank: int, microbatches: int) -> list[Action]:
    # As above with offsets of 1 both ways; a shift of 2 where 3 divides p.
    p, shift = ranks, 0 if ranks % 3 else 2
    starts = (rank, 2 * p - rank - 1, 2 * p + shift + rank, 4 * p + shift - rank - 1)
    return _repeated(ranks, rank, microbatches, starts)


def _repeated(ranks: int, rank: int, microbatches: int, starts: tuple[int, int, int, int]) -> list[Action]:
    """The block's four actions, repeated for every microbatch after 6 units (2 chunks of F, I and W)."""
    down, back = rank, 2 * ranks - 1 - rank
    block = list(zip(starts, ((F, down), (F, back), (I, back), (I, down))))
    timed = [(start + 6 * j, Action(*what, j)) for j in range(microbatches) for start, what in block]
    return [action for _, action in sorted(timed)]
