"""A finished run as text: measured against predicted, and how a rehearsal went."""

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


def summary_pieces(found: RunSummary, data_type: str) -> Iterator[Piece | str]:
    """``data_type`` is that of the matmuls, to whose peak MFU refers."""
    rows = [
        ("step time", found.predicted_seconds, found.step_seconds, readable_seconds),
        ("memory of the fullest rank", found.predicted_memory_bytes, found.memory_bytes, readable_bytes),
    ]
    cells = [
        (name, *("–" if one is None else show(one) for one in (predicted, measured)), _ratio(predicted, measured))
        for name, predicted, measured, show in rows
    ]
    yield table("Predicted beside measured", ("", "predicted", "measured", "measured / predicted"), cells)
    words = [counted(found.steps, "step")]
    if found.tokens_per_second is not None and found.mfu is not None:
        words.append(f"{readable_count(found.tokens_per_second)} tokens/s")
        words.append(f"MFU {readable_share(found.mfu)} of the {data_type} peak")
    if found.first_loss is not None and found.last_loss is not None:
        recent = (
            f" (median of the last {RECENT_LOSSES}: {found.recent_loss:.3f})" if found.steps > RECENT_LOSSES else ""
        )
        words.append(f"loss {found.first_loss:.3f} → {found.last_loss:.3f}{recent}")
    if found.first_validation is not None and found.last_validation is not None:
        share = found.last_validation / found.first_validation
        words.append(f"validation loss {found.first_validation:.3f} → {found.last_validation:.3f} ({share:.0%})")
    yield "; ".join(words)
    if found.missing_steps:
        yield f"metrics.jsonl has no line for step {found.missing_steps}: the figures above leave them out."


@paged
def training_page(found: RunSummary, job: Job, outcome: Outcome | None) -> Iterator[Piece | str]:
    """The end of a run; without an ``outcome`` there was nothing to do."""
    if outcome is None:
        more = "" if found.steps == job.run.steps else f" of {job.run.steps:,}, where run.stop_at pauses it"
        yield f"Nothing to do: the run in {job.run.folder} is at its last step, {found.steps:,}{more}."
        yield "Raise --steps to continue it, or name another --run-folder to start a new run."
        return
    if found.step_seconds is not None:
        yield from summary_pieces(found, job.training.recipe.compute)
    if outcome.status:
        saved = "there" if outcome.status == STOPPED else "the last checkpoint"
        yield f"Stopped at step {found.steps:,} of {job.run.steps:,}: the same command resumes from {saved}."
    else:
        yield f"Done: {job.run.folder}"


def training_data(found: RunSummary, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {**asdict(found), "status": 0, "stopped": False, "attempts": 0}
    failure = outcome.failure if outcome.status else None
    ended = {"status": outcome.status, "stopped": outcome.stopped, "attempts": len(outcome.attempts)}
    figures = {**asdict(found), **ended}
    return {**figures, "failure": None if failure is None else failure.reason}


def points_page(points: Sequence[RehearsalCheck]) -> Page:
    rows = [("pass" if one.passed else "FAIL", one.name, one.figure) for one in points]
    return Page((table("Rehearsal", ("", "point", "figure"), rows, numbers_from=3),))


def _ratio(predicted: float | None, measured: float | None) -> str:
    return "–" if not predicted or measured is None else f"{measured / predicted:.2f}"
