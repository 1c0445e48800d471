"""`status`: how a run is doing, while it goes on and after it; `compare`: its steps beside their prediction."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.quantities import path_text, write_text
from shardwise.api.results import Figure, Result, Rows
from shardwise.launch.observe.state import RunObserver, RunState, as_data
from shardwise.report.compare import comparison_data, comparison_page
from shardwise.report.page import Page
from shardwise.report.status import saved_data, saved_page, status_line, status_page
from shardwise.run.checkpoint.folder import NEWEST, CheckpointFolder, RunFolder, folder_at, run_folder
from shardwise.run.checkpoint.manifest import Manifest, read_manifest
from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages
from shardwise.spec.units import readable_duration

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison


_REMEDY = "name a run's folder, such as runs/demo, or where its checkpoints are"


@dataclass(frozen=True)
class StatusResult(Result):
    """The state of a run; ``ok`` is False if it failed or was killed. docs/status.md explains the states."""

    verb = "status"
    found: RunState

    step = Figure[int]("found.step")
    state = Figure[str]("found.state")
    goodput = Figure[float | None]("found.goodput", "The share of the run's time spent in steps that count.")

    @property
    def ok(self) -> bool:
        return self.found.state not in ("failed", "killed")

    @property
    def alive(self) -> bool:
        return self.found.alive

    @property
    def line(self) -> str:
        return status_line(self.found)

    @cached_property
    def page(self) -> Page:
        return status_page(self.found)

    def _data(self) -> dict[str, Any]:
        return as_data(self.found)


@dataclass(frozen=True)
class SavedResult(Result):
    """Checkpoints without the folder of their run: what the newest one says."""

    verb = "status"
    place: str
    manifest: Manifest
    age_seconds: float

    ok, alive = True, False

    @property
    def line(self) -> str:
        return f"newest commit: step {self.manifest.step:,}, {readable_duration(self.age_seconds)} ago"

    @cached_property
    def page(self) -> Page:
        return saved_page(self.place, self.manifest, self.age_seconds)

    def _data(self) -> dict[str, Any]:
        return saved_data(self.place, self.manifest, self.age_seconds)


def status(run: str | PathLike[str]) -> StatusResult | SavedResult:
    """The state of the run in a folder (runs/last: the newest), or the newest of the checkpoints at a path or URI."""
    return next(statuses(path_text(run, "run"), 0.0))


def statuses(run: str, seconds: float) -> Iterator[StatusResult | SavedResult]:
    """The status every ``seconds``, without end."""
    place = place_of(run)
    if not isinstance(place, Path) or not _is_run(place):
        while True:
            yield _saved(place)
            time.sleep(seconds)
    observer = RunObserver(observed_folder(run))
    while True:
        yield StatusResult(observer.state())
        time.sleep(seconds)


def observed_folder(run: str) -> RunFolder:
    """The folder of a run, which may have been killed before it had a job file."""
    place = place_of(run)
    if not isinstance(place, Path) or not _is_run(place):
        raise SpecError(str(place), "is not a run's folder", _REMEDY)
    return run_folder(run) if place.name == NEWEST and not place.exists() else RunFolder(place)


def _is_run(path: Path) -> bool:
    try:
        if path.name == NEWEST and not path.exists():
            return True
        names = ("job.yaml", "events.jsonl", "metrics.jsonl", "attempts", "checkpoints")
        return any((path / name).exists() for name in names)
    except (OSError, ValueError):
        return False


def _saved(place: Place) -> SavedResult:
    folder: CheckpointFolder = folder_at(place)
    try:
        committed = folder.committed()
    except OSError as error:
        raise SpecError(str(place), f"cannot be read ({error.strerror or error})", "check it") from None
    if not committed:
        raise SpecError(str(place), "holds neither a run nor a checkpoint", _REMEDY)
    newest = folder.of_step(committed[0])
    age = max(0.0, time.time() - folder.written_ns(committed[0]) / 1e9)
    return SavedResult(str(place), read_manifest(newest), age)


# -- a profiled run against its prediction, part by part, with likely causes -------------------------


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
