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
def step_page(measured: MeasuredStep) -> Iterator[Piece | str]:
    """Measured, predicted, and the error of the prediction."""
    predicted, reserved = measured.analysis, measured.reserved_bytes
    rows = [
        ("step, median", readable_seconds(measured.median_seconds), readable_seconds(predicted.predicted_seconds),
         readable_change(measured.seconds_error)),
        ("shortest", readable_seconds(min(measured.step_seconds)), "", ""),
        ("longest", readable_seconds(max(measured.step_seconds)), "", ""),
        ("tokens/s", readable_count(measured.tokens_per_second), readable_count(predicted.tokens_per_second), ""),
        ("MFU", readable_share(measured.mfu), readable_share(predicted.mfu), ""),
        ("peak memory", readable_bytes(measured.peak_bytes), readable_bytes(measured.predicted_bytes),
         readable_change(measured.memory_error)),
        *([] if reserved is None else [("reserved memory", readable_bytes(reserved), "", "")]),
    ]  # fmt: skip
    title = f"{_job_words(measured.job)}, on {measured.device_name}: {counted(len(measured.step_seconds), 'step')}"
    yield table(title, ("", "measured", "predicted", "error"), rows)
    yield f"Loss {measured.first_loss:.3f} in the first step, {measured.last_loss:.3f} in the last."
    yield f"CUDA graphs: {measured.graphs}."
    yield f"Attention: {measured.attention}."


def step_data(measured: MeasuredStep) -> dict[str, Any]:
    """Every figure, in SI units; ``job`` is the job that ran."""
    return {
        "job": measured.job.to_dict(),
        "device": measured.device_name,
        "seconds": measured.median_seconds,
        "least_seconds": min(measured.step_seconds),
        "most_seconds": max(measured.step_seconds),
        **picked(measured, "step_seconds", "tokens_per_second", "mfu", "peak_bytes", "reserved_bytes"),
        "predicted_seconds": measured.analysis.predicted_seconds,
        "predicted_tokens_per_second": measured.analysis.tokens_per_second,
        "predicted_mfu": measured.analysis.mfu,
        **picked(measured, "predicted_bytes", "seconds_error", "memory_error", "first_loss", "last_loss"),
        **picked(measured, "graphs", "attention"),
    }


def _job_words(job: Job) -> str:
    training, strategy = job.training, job.strategy
    batch = f"{job.sequences:,} × {training.seq:,} tokens"
    if job.microbatches > 1:
        batch += f" in {counted(job.microbatches, 'microbatch')}"
    parts = [job.model.name or "a model", batch, training.precision]
    parts += [] if strategy.recompute == "none" else [f"recompute {strategy.recompute}"]
    return ", ".join([*parts, *(["compiled"] if training.compile else [])])
