"""Pipeline schedules by name: what their records (`spec.schedules`) say, and their actions."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from shardwise.pipeline.schedule import PipelineSchedule, StageTimes
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.schedules import ScheduleRecord, chosen_chunks_schedules, imported, schedule_record

USUAL_CHUNKS = 2  # where the user may choose and does not


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    """The schedule ``name`` over ``ranks`` pipeline ranks.

    ``chunks`` (stages per rank) is a choice for interleaved only. ``times`` and ``comm_seconds`` place the
    weight gradients of zbv, v-half, v-min and the automatic zb-1p, zb-2p and zb-auto (default: all passes
    equal); the others have one order. ``memory_limit``, in microbatch activations, is zb-auto's, and
    ``released_by_input_grad`` the share of an activation that zb-1p, zb-2p and zb-auto may count as free
    after its input gradient.
    """
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    v = chunks_per_rank(name, chunks)
    if times is not None and times.stages != ranks * v:
        problem = f"{times.stages} stages, but {name} on {ranks} ranks has {ranks * v}"
        raise SpecError("times", problem, "give one time per stage")
    if not 0 <= released_by_input_grad <= 1:
        problem = f"{shown(released_by_input_grad)} is not between 0 and 1"
        raise SpecError("released_by_input_grad", problem, "give a number between 0 and 1")
    record = schedule_record(name)
    taken = _taken(record)
    if memory_limit is not None and "memory_limit" not in taken:
        raise SpecError("memory_limit", f"{name} has its own memory", "use zb-auto to give a limit")
    given: dict[str, Any] = {
        "chunks": v,
        "times": times,
        "memory_limit": memory_limit,
        "comm_seconds": comm_seconds,
        "released_by_input_grad": released_by_input_grad,
    }
    builder = imported(record.builder)
    built: PipelineSchedule = builder(ranks, microbatches, **{key: given[key] for key in taken if key in given})
    return built


@lru_cache(maxsize=256)
def _taken(record: ScheduleRecord) -> frozenset[str]:
    """The further arguments that a builder takes besides ranks and microbatches."""
    return frozenset(inspect.signature(imported(record.builder)).parameters)


def chunks_per_rank(name: str, chunks: int | None = None) -> int:
    """Stages per rank of schedule ``name``; ``chunks`` is what the user asked for, if anything."""
    own = schedule_record(name).chunks
    if chunks is not None:
        _check_count("chunks", chunks)
    if own is None:
        return USUAL_CHUNKS if chunks is None else chunks
    if chunks not in (None, own):
        remedy = f"leave chunks out, or use {' or '.join(chosen_chunks_schedules())}"
        raise SpecError("chunks", f"{name} has {own} per rank, not {chunks}", remedy)
    return own


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(field, f"{shown(value)} is not a count", "give a whole number of 1 or more")
