"""What is taken from the page: a framework's configuration, and the predicted step as a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.api.analysis import require_few_passes
from shardwise.cost.step.trace import step_trace
from shardwise.interop.frameworks import TARGETS, target
from shardwise.planner.advice.exported import priced_export
from shardwise.report.export import export_data
from shardwise.spec.errors import SpecError, shown
from shardwise.ui.given import job_of

_MOST_PASSES = 100_000  # of a trace that a browser opens in seconds


def exported(given: Mapping[str, Any]) -> dict[str, Any]:
    """The data of `export --json`; ``to`` names the framework."""
    to = given.get("to")
    if not isinstance(to, str):
        raise SpecError("to", f"{shown(to)} is not a framework", "choose one of " + ", ".join(TARGETS))
    chosen = target(to)
    job, _ = job_of({name: value for name, value in given.items() if name != "to"})
    return export_data(chosen.export(job), priced_export(job, chosen.name))


def trace(given: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted step in Chrome's format, as `analyze --trace` writes it."""
    job, _ = job_of(given)
    require_few_passes(job, "trace", _MOST_PASSES)
    return step_trace(job)
