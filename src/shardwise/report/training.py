"""A finished run as text: measured against predicted; the checks of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.launch.outcome import STOPPED, Outcome
from shardwise.launch.rehearsal import RehearsalCheck
from shardwise.report.console import table
from shardwise.report.page import Page, Piece, paged
from shardwise.run.metrics.lines import RECENT_LOSSES, RunSummary
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_bytes, readable_count, readable_seconds, readable_share


def summary_pieces(summary: RunSummary, data_type: str) -> Iterator[Piece | str]:
    """The figures of a run; MFU is relative to the device's peak in ``data_type``, that of the matmuls."""
    rows = [
        ("step time", summary.predicted_seconds, summary.step_seconds, readable_seconds),
        ("memory of the fullest rank", summary.predicted_memory_bytes, summary.memory_bytes, readable_bytes),
    ]
    cells = [
        (
            name,
            *("–" if figure is None else show(figure) for figure in (predicted, measured)),
            "–" if not predicted or measured is None else f"{measured / predicted:.2f}",
        )
        for name, predicted, measured, show in rows
    ]
    yield table("Predicted beside measured", ("", "predicted", "measured", "measured / predicted"), cells)
    words = [counted(summary.steps, "step")]
    if summary.tokens_per_second is not None and summary.mfu is not None:
        words.append(f"{readable_count(summary.tokens_per_second)} tokens/s")
        words.append(f"MFU {readable_share(summary.mfu)} of the {data_type} peak")
    if summary.first_loss is not None and summary.last_loss is not None:
        recent = (
            f" (median of the last {RECENT_LOSSES}: {summary.recent_loss:.3f})" if summary.steps > RECENT_LOSSES else ""
        )
        words.append(f"loss {summary.first_loss:.3f} → {summary.last_loss:.3f}{recent}")
    if summary.first_validation is not None and summary.last_validation is not None:
        share = summary.last_validation / summary.first_validation
        words.append(f"validation loss {summary.first_validation:.3f} → {summary.last_validation:.3f} ({share:.0%})")
    yield "; ".join(words)
    if summary.missing_steps:
        yield f"metrics.jsonl has no line for step {summary.missing_steps}: the figures above leave them out."


@paged
def training_page(summary: RunSummary, job: Job, outcome: Outcome | None) -> Iterator[Piece | str]:
    """How a run ended; without an ``outcome`` there was nothing left to do."""
    if outcome is None:
        more = "" if summary.steps == job.run.steps else f" of {job.run.steps:,}, where run.stop_at pauses it"
        yield f"Nothing to do: the run in {job.run.folder} is at its last step, {summary.steps:,}{more}."
        yield "Raise --steps to continue it, or name another --run-folder to start a new run."
        return
    if summary.step_seconds is not None:
        yield from summary_pieces(summary, job.training.recipe.compute)
    if outcome.status:
        saved = "there" if outcome.status == STOPPED else "the last checkpoint"
        yield f"Stopped at step {summary.steps:,} of {job.run.steps:,}: the same command resumes from {saved}."
    else:
        yield f"Done: {job.run.folder}"


def training_data(summary: RunSummary, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {**asdict(summary), "status": 0, "stopped": False, "attempts": 0}
    failure = outcome.failure if outcome.status else None
    ended = {"status": outcome.status, "stopped": outcome.stopped, "attempts": len(outcome.attempts)}
    figures = {**asdict(summary), **ended}
    return {**figures, "failure": None if failure is None else failure.reason}


def points_page(points: Sequence[RehearsalCheck]) -> Page:
    rows = [("pass" if check.passed else "FAIL", check.name, check.figure) for check in points]
    return Page((table("Rehearsal", ("", "point", "figure"), rows, numbers_from=3),))
