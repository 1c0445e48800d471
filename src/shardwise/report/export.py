"""A job as another framework's configuration, as plain data: its files, what it cannot express, both prices."""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks import Exported
from shardwise.planner.advice.exported import PricedExport
from shardwise.planner.candidate import Candidate
from shardwise.report.console import picked


def export_data(exported: Exported, priced: PricedExport) -> dict[str, Any]:
    """Everything `export` says; times in seconds, memory in bytes."""
    return {
        **picked(exported, "target", "version", "files", "lost", "notes"),
        "priced": {"job": _figures(priced.here), "exported": _figures(priced.there), "differs": list(priced.differs)},
    }


def _figures(candidate: Candidate | None) -> dict[str, float] | None:
    if candidate is None:
        return None
    return picked(candidate, predicted_seconds="step_seconds", memory_bytes="memory.total")
