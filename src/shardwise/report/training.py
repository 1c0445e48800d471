"""A finished run as text: measured against predicted, and how a rehearsal went."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.launch.rehearsal import Point
from shardwise.report.console import console, table
from shardwise.spec.units import counted, readable_bytes, readable_count, readable_seconds, readable_share
from shardwise.training.metrics.lines import RunSummary


def print_summary(found: RunSummary, data_type: str) -> None:
    """``data_type`` is that of the matmuls, to whose peak MFU refers."""
    out = console()
    rows = [
        ("step time", found.predicted_seconds, found.step_seconds, readable_seconds),
        ("memory of the fullest rank", found.predicted_memory_bytes, found.memory_bytes, readable_bytes),
    ]
    cells = [
        (name, *("–" if one is None else show(one) for one in (predicted, measured)), _ratio(predicted, measured))
        for name, predicted, measured, show in rows
    ]
    out.print(table("Predicted beside measured", ("", "predicted", "measured", "measured / predicted"), cells))
    words = [counted(found.steps, "step")]
    if found.tokens_per_second is not None and found.mfu is not None:
        words.append(f"{readable_count(found.tokens_per_second)} tokens/s")
        words.append(f"MFU {readable_share(found.mfu)} of the {data_type} peak")
    if found.first_loss is not None and found.last_loss is not None:
        words.append(f"loss {found.first_loss:.3f} → {found.last_loss:.3f}")
    if found.first_validation is not None and found.last_validation is not None:
        share = found.last_validation / found.first_validation
        words.append(f"validation loss {found.first_validation:.3f} → {found.last_validation:.3f} ({share:.0%})")
    out.print("; ".join(words))
    if found.missing_steps:
        out.print(f"metrics.jsonl has no line for step {found.missing_steps}: the figures above leave them out.")


def print_points(points: Sequence[Point]) -> None:
    rows = [("pass" if one.passed else "FAIL", one.name, one.figure) for one in points]
    console().print(table("Rehearsal", ("", "point", "figure"), rows, numbers_from=3))


def _ratio(predicted: float | None, measured: float | None) -> str:
    return "–" if not predicted or measured is None else f"{measured / predicted:.2f}"
