"""Bubbles and activations in flight by formula, without building the schedule.

The formulas of a schedule are beside its builder (`builders`), as `ClosedForms`. A schedule without any is built and
simulated, or its actions are counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.build import build, chunks_per_rank
from shardwise.pipeline.forms import ClosedForms, EqualStages, paced_by_messages
from shardwise.pipeline.schedule import PipelineSchedule, equal_stages
from shardwise.pipeline.simulator import simulate
from shardwise.pipeline.timeline import peak_activations
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import ScheduleRecord, imported, schedule_record


def bubble_seconds(
    name: str,
    ranks: Any,
    microbatches: Any,
    chunks: Any = None,
    forward: Any = 1.0,
    input_grad: Any = 1.0,
    weight_grad: Any = 1.0,
    comm_seconds: Any = 0.0,
    released_by_input_grad: float = 0.0,
) -> Any:
    """Idle seconds of the longest rank (``Timeline.bubble_seconds``), for equal stages.

    Times are for one stage (one chunk). All arguments but the name may be numpy arrays.
    """
    v = chunks_per_rank(name) if chunks is None else chunks
    case = EqualStages(ranks, microbatches, v, forward, input_grad, weight_grad, comm_seconds, released_by_input_grad)
    record = schedule_record(name)
    forms = _forms(record)
    if forms is None:
        return _simulated_bubbles(name, case)
    bubble = forms.bubble(case)
    if forms.any_messages:
        return bubble
    pace = forms.pace(case) if forms.pace else paced_by_messages(case, record)
    return maximum(bubble, (ranks > 1) * (pace - case.work))


def bubble_is_exact(
    name: str,
    ranks: int,
    microbatches: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    comm_seconds: float = 0.0,
) -> bool:
    """Whether ``bubble_seconds`` equals the simulator (equal stages, B = I + W, overlapped messages)."""
    forms = _forms(schedule_record(name))
    case = EqualStages(ranks, microbatches, chunks_per_rank(name), forward, input_grad, weight_grad, comm_seconds)
    return ranks == 1 or forms is None or bool(forms.is_exact(case))


def peak_chunks_in_flight(name: str, ranks: int, microbatches: int, chunks: int | None, rank: int) -> int:
    """Activations of one chunk (stage) and microbatch that ``rank`` holds at its peak.

    Equal to the peak of the built schedule; with times given, zbv, v-half, v-min, zb-1p and zb-2p may hold less,
    never more. Divide by the chunks per rank for microbatches of the whole rank.
    """
    if not 0 <= rank < ranks:
        raise SpecError("rank", f"{rank} is not one of the {ranks} pipeline ranks", f"give 0 to {ranks - 1}")
    v, forms = chunks_per_rank(name, chunks), _forms(schedule_record(name))
    if forms is None:
        return _counted_peaks(name, ranks, microbatches, v)[rank]
    return forms.in_flight(ranks, microbatches, v, rank)


def _forms(record: ScheduleRecord) -> ClosedForms | None:
    found: ClosedForms | None = imported(record.closed_forms)
    return found


def _simulated_bubbles(name: str, case: EqualStages) -> Any:
    if not any(getattr(value, "ndim", 0) for value in case):
        return _simulated_bubble(name, case)
    import numpy as np

    columns = np.broadcast_arrays(*case)
    rows = zip(*(column.ravel().tolist() for column in columns))
    return np.array([_simulated_bubble(name, EqualStages(*row)) for row in rows]).reshape(columns[0].shape)


@lru_cache(maxsize=65536)
def _simulated_bubble(name: str, case: EqualStages) -> float:
    if case.p == 1:
        return 0.0
    schedule = _built(name, int(case.p), int(case.m), int(case.v))
    return simulate(schedule, equal_stages(schedule.stages, case.F, case.I, case.W), case.c).bubble_seconds


@lru_cache(maxsize=4096)
def _counted_peaks(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    return tuple(map(round, peak_activations(_built(name, ranks, microbatches, chunks))))


@lru_cache(maxsize=64)
def _built(name: str, ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Rounded up to whole rounds: a search also prices batches that do not divide into rounds, and drops them later."""
    rounds = schedule_record(name).rounds(ranks)
    return build(name, ranks, -(-max(1, microbatches) // rounds) * rounds, chunks)
