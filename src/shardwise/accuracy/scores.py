"""Reported against predicted: row by row, by device, and overall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.accuracy.ranges import Range
from shardwise.accuracy.runs import PublishedRun, counts_reserved, reported_rank
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.memory.reserved import allocated_bytes, reserved_bytes
from shardwise.cost.step.prediction import predict
from shardwise.uncertainty.residuals import error_bar, left_out_errors


@dataclass(frozen=True)
class ErrorSummary:
    """Mean and worst absolute error, as fractions."""

    rows: int
    mean: float
    worst: float


def summarize_errors(errors: Iterable[tuple[str, float]]) -> dict[str, ErrorSummary]:
    """Summaries of (group, error) pairs: every group in order of appearance, then ``all``."""
    groups: dict[str, list[float]] = {}
    every = []
    for name, error in errors:
        groups.setdefault(name, []).append(abs(error))
        every.append(abs(error))
    groups["all"] = every
    return {name: ErrorSummary(len(own), sum(own) / len(own), max(own)) for name, own in groups.items()}


@dataclass(frozen=True)
class Score:
    """One run, scored; errors are fractions of what was reported.

    ``predicted_seconds_low`` and ``high`` span the plausible values of what the source does not print. ``bar_*`` are
    the ends of the error bar that `plan` gives such a job; ``bar_of`` and ``memory_bar_of`` name the class it is of.
    ``left_out_error`` is the error with the row's source left out of the fit, for rows that the fit may know.
    """

    row_id: str
    device: str
    model: str
    source: str
    reported_from: str
    reported_seconds: float | None
    predicted_seconds: float
    time_error: float | None
    left_out_error: float | None
    assumed: tuple[str, ...]
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    in_range: bool | None
    bar_low_seconds: float
    bar_high_seconds: float
    in_bar: bool | None
    bar_of: str
    reported_memory_bytes: float | None
    predicted_memory_bytes: float
    memory_error: float | None
    memory_kind: str
    bar_low_bytes: float
    bar_high_bytes: float
    memory_in_bar: bool | None
    memory_bar_of: str
    fits: bool
    set_aside: str


def score(run: PublishedRun, over: Range | None = None) -> Score:
    """The prediction for one run beside what was reported of it, and the range if it is given."""
    seconds, memory = predict(run.job).step_seconds, peak_memory(run.job)
    predicted, reported, time = predicted_memory(run), run.reported_memory_bytes, run.reported_seconds
    bar = error_bar(run.job)
    low, high = seconds * (1 + bar.time_low), seconds * (1 + bar.time_high)
    least, most = predicted * (1 + bar.memory_low), predicted * (1 + bar.memory_high)
    return Score(
        row_id=run.row_id,
        device=run.device,
        model=run.model_name,
        source=run.source.name,
        reported_from=run.reported_from,
        reported_seconds=time,
        predicted_seconds=seconds,
        time_error=None if time is None else seconds / time - 1,
        left_out_error=left_out_errors().get(run.row_id),
        assumed=over.fields if over else (),
        predicted_seconds_low=over.low if over else None,
        predicted_seconds_high=over.high if over else None,
        in_range=over.low <= time <= over.high if over and time is not None else None,
        bar_low_seconds=low,
        bar_high_seconds=high,
        in_bar=None if time is None else low <= time <= high,
        bar_of=bar.time_of,
        reported_memory_bytes=reported,
        predicted_memory_bytes=predicted,
        memory_error=None if reported is None else predicted / reported - 1,
        memory_kind=run.memory_kind,
        bar_low_bytes=least,
        bar_high_bytes=most,
        memory_in_bar=None if reported is None else least <= reported <= most,
        memory_bar_of=bar.memory_of,
        fits=memory.total <= run.job.cluster.device.usable_memory,
        set_aside=run.set_aside,
    )


def predicted_memory(run: PublishedRun) -> float:
    """What the figure of a run counts: tensors, or what the allocator reserves for them.

    Of the framework's allowance only workspaces are a part of it.
    """
    rank = reported_rank(run.memory_kind, run.source, run.job.strategy.pp)
    memory = peak_memory(run.job) if rank is None else memory_of_rank(run.job, rank)
    if counts_reserved(run.memory_kind, run.source):
        return reserved_bytes(run.job, memory)
    return allocated_bytes(run.job, memory)


@dataclass(frozen=True)
class Summary:
    """Mean and worst absolute error and bias over the rows of one device that are not set aside.

    ``left_out_mape`` is the mean with each row's source left out of the fit, of rows that the fit may know.
    Of ``ranged_rows`` rows with something assumed, ``in_range`` is the share whose range contains the report.
    """

    rows: int
    time_mape: float | None
    time_worst: float | None
    time_bias: float | None
    left_out_mape: float | None
    memory_mape: float | None
    memory_worst: float | None
    ranged_rows: int
    in_range: float | None


def summarize(scores: Iterable[Score]) -> dict[str, Summary]:
    """Per device, in the order of the table; a device of which every row is set aside is left out."""
    by_device: dict[str, list[Score]] = {}
    for row in scores:
        if not row.set_aside:
            by_device.setdefault(row.device, []).append(row)
    return {device: summary(own) for device, own in by_device.items()}


def summary(scores: list[Score]) -> Summary:
    times = [row.time_error for row in scores if row.time_error is not None]
    left_out = [row.left_out_error for row in scores if row.left_out_error is not None]
    memories = [abs(row.memory_error) for row in scores if row.memory_error is not None]
    ranged = [row.in_range for row in scores if row.in_range is not None]
    return Summary(
        rows=len(scores),
        time_mape=sum(map(abs, times)) / len(times) if times else None,
        time_worst=max(map(abs, times)) if times else None,
        time_bias=sum(times) / len(times) if times else None,
        left_out_mape=sum(map(abs, left_out)) / len(left_out) if left_out else None,
        memory_mape=sum(memories) / len(memories) if memories else None,
        memory_worst=max(memories) if memories else None,
        ranged_rows=len(ranged),
        in_range=sum(ranged) / len(ranged) if ranged else None,
    )
