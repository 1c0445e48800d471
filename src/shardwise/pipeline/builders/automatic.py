"""Zero bubble under a memory limit: ZB-1p (p microbatches), ZB-2p (2p), or any other.

The search of Qi et al. 2023, arXiv 2401.10241, section 3.1, made simple: a 1F1B order with as many forwards ahead
as memory and the first backward's arrival allow, weight gradients filled in, and the few open choices tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from shardwise.pipeline.builders.fill import fill_weight_gradients
from shardwise.pipeline.builders.one_f_one_b import one_forward_one_backward
from shardwise.pipeline.builders.zero_bubble import deferred_bubble, h1_bubble, h1_pace
from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.schedule import ActionKind, PipelineSchedule, loop_placement
from shardwise.pipeline.simulator import simulate
from shardwise.pipeline.times import StageTimes, equal_stages
from shardwise.spec.errors import SpecError, shown


def zb_1p(
    ranks: int,
    microbatches: int,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    return _shortest("zb-1p", ranks, microbatches, ranks, times, comm_seconds, released_by_input_grad)


def zb_2p(
    ranks: int,
    microbatches: int,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    return _shortest("zb-2p", ranks, microbatches, 2 * ranks, times, comm_seconds, released_by_input_grad)


def zb_auto(
    ranks: int,
    microbatches: int,
    memory_limit: float | None = None,
    times: StageTimes | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    if memory_limit is None:
        raise SpecError("memory_limit", "zb-auto needs one", f"give a number of microbatches, such as {ranks}")
    return _shortest("zb-auto", ranks, microbatches, memory_limit, times, comm_seconds, released_by_input_grad)


def _shortest(
    name: str,
    ranks: int,
    microbatches: int,
    memory_limit: float,
    times: StageTimes | None,
    comm_seconds: float,
    released_by_input_grad: float,
) -> PipelineSchedule:
    """The order with the shortest longest rank among those tried; ``memory_limit`` in microbatch activations.

    The published near-zero bubbles of ZB-2p need the share that the input gradient releases: 1 - 32/(34 + 5as/h)
    for an unfused transformer layer (paper, Table 1).
    """
    if not memory_limit >= 1:
        raise SpecError("memory_limit", f"{shown(memory_limit)} holds no microbatch", "give 1 or more")
    known = times or equal_stages(ranks)

    def cost(schedule: PipelineSchedule) -> float:
        return simulate(schedule, known, comm_seconds).longest_rank_seconds

    candidates = []
    ahead = dict.fromkeys(_in_flights(known, memory_limit, comm_seconds))
    for in_flight, smallest_gap in product(ahead, (0.3, 0.6, 1.0)):
        orders = [one_forward_one_backward(r, microbatches, in_flight[r], ActionKind.I) for r in range(ranks)]
        candidates.append(
            fill_weight_gradients(
                name,
                loop_placement(ranks),
                microbatches,
                orders,
                [memory_limit] * ranks,
                known,
                comm_seconds,
                smallest_gap,
                released_by_input_grad,
            )
        )
    return min(candidates, key=cost)


def _in_flights(times: StageTimes, memory_limit: float, comm_seconds: float) -> Iterator[tuple[int, ...]]:
    """Forwards ahead of the first backward, per rank: 1F1B's, and what fits before it arrives (and one more)."""
    ranks, limit = times.stages, int(memory_limit)
    yield tuple(min(limit, ranks - rank) for rank in range(ranks))
    for extra in (0.0, 0.999):
        yield tuple(max(1, min(limit, int(_fitting(times, rank, comm_seconds) + extra))) for rank in range(ranks))


def _fitting(times: StageTimes, rank: int, comm_seconds: float) -> float:
    """Forwards of ``rank`` between its first input and its first gradient: there and back along the later stages."""
    hops = times.stages - 1 - rank
    away = sum(times.forward[rank:]) + sum(times.input_grad[rank + 1 :]) + 2 * hops * comm_seconds
    pace = max(times.forward[: rank + 1])
    return away / pace if pace else float(times.stages)


def _2p_bubble(case: EqualStages) -> Any:
    """As zb-h2, with room for as many waiting weight gradients as 2p activations give."""
    return deferred_bubble(case, (2 * case.p - 1) / max(1 - case.released, 1e-9))


ONE_P_FORMS = ClosedForms(bubble=h1_bubble, in_flight=lambda p, m, v, r: min(m, p), pace=h1_pace)
TWO_P_FORMS = ClosedForms(bubble=_2p_bubble, in_flight=lambda p, m, v, r: min(m, 2 * p))
