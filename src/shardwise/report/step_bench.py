"""A measured step beside its prediction, as a table and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.report.console import picked, table
from shardwise.report.page import Piece, paged
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_change,
    readable_count,
    readable_seconds,
    readable_share,
)

if TYPE_CHECKING:
    from shardwise.measure.step import MeasuredStep


@paged
def step_page(found: MeasuredStep) -> Iterator[Piece | str]:
    """Measured, predicted, and the error of the prediction."""
    predicted, reserved = found.analysis, found.reserved_bytes
    rows = [
        ("step, median", readable_seconds(found.median_seconds), readable_seconds(predicted.predicted_seconds),
         readable_change(found.seconds_error)),
        ("shortest", readable_seconds(min(found.step_seconds)), "", ""),
        ("longest", readable_seconds(max(found.step_seconds)), "", ""),
        ("tokens/s", readable_count(found.tokens_per_second), readable_count(predicted.tokens_per_second), ""),
        ("MFU", readable_share(found.mfu), readable_share(predicted.mfu), ""),
        ("peak memory", readable_bytes(found.peak_bytes), readable_bytes(found.predicted_bytes),
         readable_change(found.memory_error)),
        *([] if reserved is None else [("reserved memory", readable_bytes(reserved), "", "")]),
    ]  # fmt: skip
    title = f"{_job_words(found.job)}, on {found.device_name}: {counted(len(found.step_seconds), 'step')}"
    yield table(title, ("", "measured", "predicted", "error"), rows)
    yield f"Loss {found.first_loss:.3f} in the first step, {found.last_loss:.3f} in the last."
    yield f"CUDA graphs: {found.graphs}."
    yield f"Attention: {found.attention}."


def step_data(found: MeasuredStep) -> dict[str, Any]:
    """Every figure, in SI units; ``job`` is the job that ran."""
    return {
        "job": found.job.to_dict(),
        "device": found.device_name,
        "seconds": found.median_seconds,
        "least_seconds": min(found.step_seconds),
        "most_seconds": max(found.step_seconds),
        **picked(found, "step_seconds", "tokens_per_second", "mfu", "peak_bytes", "reserved_bytes"),
        "predicted_seconds": found.analysis.predicted_seconds,
        "predicted_tokens_per_second": found.analysis.tokens_per_second,
        "predicted_mfu": found.analysis.mfu,
        **picked(found, "predicted_bytes", "seconds_error", "memory_error", "first_loss", "last_loss"),
        **picked(found, "graphs", "attention"),
    }


def _job_words(job: Job) -> str:
    training, strategy = job.training, job.strategy
    batch = f"{job.sequences:,} × {training.seq:,} tokens"
    if job.microbatches > 1:
        batch += f" in {counted(job.microbatches, 'microbatch')}"
    parts = [job.model.name or "a model", batch, training.precision]
    parts += [] if strategy.recompute == "none" else [f"recompute {strategy.recompute}"]
    return ", ".join([*parts, *(["compiled"] if training.compile else [])])
