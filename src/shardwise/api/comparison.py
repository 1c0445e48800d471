"""`compare`: a profiled run against its prediction, part by part, with likely causes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.quantities import path_text, write_text
from shardwise.api.results import Figure, Result, Rows
from shardwise.report.compare import comparison_data, comparison_page
from shardwise.report.page import Page
from shardwise.spec.installation import require_packages

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison

TRACE = "timeline.json"


@dataclass(frozen=True)
class ComparisonResult(Result):
    """A run's profiled steps against their prediction."""

    verb = "compare"
    found: Comparison
    trace: Path
    """The file with both timelines."""

    predicted_seconds = Figure[float]("found.predicted.step_seconds")
    measured_seconds = Figure[float]("found.measured.step_seconds", "Of a profiled step; profiling makes steps longer.")

    @cached_property
    def page(self) -> Page:
        return comparison_page(self.found, self.trace)

    @cached_property
    def plots(self) -> Page:
        """The same in pictures."""
        from shardwise.report.charts.sections import comparison_plots

        return comparison_plots(self.found)

    def _data(self) -> dict[str, Any]:
        return {**comparison_data(self.found), "trace": str(self.trace)}

    def tables(self) -> Mapping[str, Rows]:
        data = self.to_dict()
        return {
            "parts": [{"part": name, **figures} for name, figures in data["parts"].items()],
            "memory": [{"part": name, **figures} for name, figures in data["memory"].items()],
            "differences": data["differences"],
            "ranks": data["ranks"],
        }


def compare(run: str | PathLike[str], *, trace: str | PathLike[str] | None = None) -> ComparisonResult:
    """Compares a run that was profiled (``train(..., profile="steps=10:12")``) with its prediction.

    ``run`` is its folder, runs/last the newest. Both timelines are written to ``trace`` (default: in the folder).
    """
    require_packages("compare", "torch")
    from shardwise.measure.compare import comparison
    from shardwise.measure.compare.comparison import profiled_run, timeline

    profiled = profiled_run(path_text(run, "run"))
    result = comparison.compare(profiled)
    path = profiled.folder.profile / TRACE if trace is None else Path(path_text(trace, "⟨trace⟩"))
    write_text(path, json.dumps(timeline(profiled.job, profiled.measured)), "⟨trace⟩")
    return ComparisonResult(result, path)
