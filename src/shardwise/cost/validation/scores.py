"""Reported against predicted, row by row, and what that says per device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.cost.memory import peak_memory
from shardwise.cost.prediction import predict
from shardwise.cost.validation.runs import Run


@dataclass(frozen=True)
class Score:
    """One run, scored; errors are fractions of what was reported."""

    row_id: str
    device: str
    model: str
    source: str
    reported_from: str
    reported_seconds: float
    predicted_seconds: float
    time_error: float
    reported_memory_bytes: float | None
    predicted_memory_bytes: float
    memory_error: float | None
    memory_kind: str
    fits: bool
    set_aside: str


def score(run: Run) -> Score:
    """The prediction for one run beside what was reported of it.

    Memory is what tensors take: the framework's allowance is not part of any published figure's "allocated".
    """
    seconds, memory = predict(run.job).step_seconds, peak_memory(run.job)
    tensors = memory.total - memory.allowance
    reported = run.reported_memory_bytes
    return Score(
        run.row_id,
        run.device,
        run.model_name,
        run.source.prefix,
        run.reported_from,
        run.reported_seconds,
        seconds,
        seconds / run.reported_seconds - 1,
        reported,
        tensors,
        None if reported is None else tensors / reported - 1,
        run.memory_kind,
        memory.total <= run.job.cluster.device.memory,
        run.set_aside,
    )


@dataclass(frozen=True)
class Summary:
    """Mean and worst absolute error and bias over the rows of one device that are not set aside."""

    rows: int
    time_mape: float
    time_worst: float
    time_bias: float
    memory_mape: float | None
    memory_worst: float | None


def summarize(scores: Iterable[Score]) -> dict[str, Summary]:
    """Per device, in the order of the table."""
    by_device: dict[str, list[Score]] = {}
    for one in scores:
        if not one.set_aside:
            by_device.setdefault(one.device, []).append(one)
    return {device: _summary(own) for device, own in by_device.items()}


def _summary(scores: list[Score]) -> Summary:
    times = [one.time_error for one in scores]
    memories = [abs(one.memory_error) for one in scores if one.memory_error is not None]
    return Summary(
        len(scores),
        sum(map(abs, times)) / len(times),
        max(map(abs, times)),
        sum(times) / len(times),
        sum(memories) / len(memories) if memories else None,
        max(memories) if memories else None,
    )
