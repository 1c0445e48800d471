"""Builds a pipeline schedule by name, from its record in `spec.schedules`."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from shardwise.pipeline.schedule import PipelineSchedule, StageTimes, check_released
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.schedules import ScheduleRecord, chosen_chunks_schedules, imported, schedule_record

DEFAULT_CHUNKS = 2  # of a schedule that leaves the choice to the user


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
    ahead: int = 0,
) -> PipelineSchedule:
    """The schedule ``name`` over ``ranks`` pipeline ranks.

    - ``chunks``, stages per rank, is a choice for interleaved only.
    - ``times`` and ``comm_seconds`` decide where zbv, zb-1p, zb-2p and zb-auto run weight gradients (default: all
      passes equal).
    - ``memory_limit``, in microbatch activations, is for zb-auto.
    - ``released_by_input_grad`` is the share of an activation that zb-1p, zb-2p and zb-auto count as free after its
      input gradient.
    - ``ahead`` is the number of additional forward passes before the first backward pass, for schedules that
      have them (`ScheduleRecord.ahead_of_exchange`).
    """
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    v = chunks_per_rank(name, chunks)
    if times is not None and times.stages != ranks * v:
        problem = f"{times.stages} stages, but {name} on {ranks} ranks has {ranks * v}"
        raise SpecError("times", problem, "give one time per stage")
    check_released(released_by_input_grad)
    record = schedule_record(name)
    parameters = _parameters(record)
    if memory_limit is not None and "memory_limit" not in parameters:
        raise SpecError("memory_limit", f"{name} has a fixed memory need", "use zb-auto to set a limit")
    given: dict[str, Any] = {
        "chunks": v,
        "ahead": ahead,
        "times": times,
        "memory_limit": memory_limit,
        "comm_seconds": comm_seconds,
        "released_by_input_grad": released_by_input_grad,
    }
    builder = imported(record.builder)
    built: PipelineSchedule = builder(ranks, microbatches, **{key: given[key] for key in parameters if key in given})
    return built


@lru_cache(maxsize=256)
def _parameters(record: ScheduleRecord) -> frozenset[str]:
    return frozenset(inspect.signature(imported(record.builder)).parameters)


def chunks_per_rank(name: str, chunks: int | None = None) -> int:
    """Stages per rank of schedule ``name``; ``chunks`` is the user's choice, if any."""
    own = schedule_record(name).chunks
    if chunks is not None:
        _check_count("chunks", chunks)
    if own is None:
        return DEFAULT_CHUNKS if chunks is None else chunks
    if chunks not in (None, own):
        remedy = f"leave chunks out, or use {' or '.join(chosen_chunks_schedules())}"
        raise SpecError("chunks", f"{name} has {own} per rank, not {chunks}", remedy)
    return own


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(field, f"{shown(value)} is not a count", "give a whole number of 1 or more")
