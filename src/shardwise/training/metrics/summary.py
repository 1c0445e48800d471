"""A run in figures, out of its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.training.metrics.lines import missing_steps, spelled_ranges

WARM_UP = 3  # steps after a start that take longer than others


@dataclass(frozen=True)
class RunSummary:
    """Medians over the steps of a run; None if nothing is known."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    first_validation: float | None
    last_validation: float | None
    step_seconds: float | None
    predicted_seconds: float | None
    memory_bytes: float | None
    predicted_memory_bytes: float | None
    tokens_per_second: float | None
    mfu: float | None
    data_wait_share: float | None
    missing_steps: str = ""  # of which metrics.jsonl has no line, such as "11 to 14"


def summarise(records: Iterable[Mapping[str, Any]]) -> RunSummary:
    """Of the records of metrics.jsonl; steps whose memory was counted are slow on a CPU, and not timed."""
    everything = list(records)
    steps = [one for one in everything if one.get("seconds") is not None]
    timed = [one for one in steps[WARM_UP:] if "memory_bytes_of_ranks" not in one] or steps
    losses = [one["loss"] for one in steps if one.get("loss") is not None and not one.get("bad")]
    validation = [one["validation_loss"] for one in everything if one.get("validation_loss") is not None]
    seconds = _median(one["seconds"] for one in timed)
    waited = sum(one.get("data_wait_seconds") or 0.0 for one in timed)
    return RunSummary(
        steps=max((one["step"] for one in everything), default=0),
        first_loss=losses[0] if losses else None,
        last_loss=_median(losses[-10:]),
        first_validation=validation[0] if validation else None,
        last_validation=validation[-1] if validation else None,
        step_seconds=seconds,
        predicted_seconds=_last(steps, "predicted_seconds"),
        memory_bytes=max((one["memory_bytes"] for one in steps if one.get("memory_bytes") is not None), default=None),
        predicted_memory_bytes=_last(steps, "predicted_memory_bytes"),
        tokens_per_second=_median_of(timed, "tokens_per_second"),
        mfu=_median_of(timed, "mfu"),
        data_wait_share=waited / sum(one["seconds"] for one in timed) if timed else None,
        missing_steps=spelled_ranges(missing_steps(everything, _last(everything, "checkpoint"))),
    )


def _median(values: Iterable[float]) -> float | None:
    some = list(values)
    return statistics.median(some) if some else None


def _median_of(records: list[Mapping[str, Any]], name: str) -> float | None:
    return _median(one[name] for one in records if one.get(name) is not None)


def _last(records: list[Mapping[str, Any]], name: str) -> float | None:
    return next((one[name] for one in reversed(records) if one.get(name) is not None), None)
