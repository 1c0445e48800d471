"""`status`: how a run is doing, while it goes on and after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.api.quantities import path_text
from shardwise.api.results import Figure, Result
from shardwise.launch.observe.state import RunObserver, RunState, as_data
from shardwise.report.page import Page
from shardwise.report.status import saved_data, saved_page, status_line, status_page
from shardwise.run.checkpoint.folder import NEWEST, CheckpointFolder, RunFolder, folder_at, run_folder
from shardwise.run.checkpoint.manifest import Manifest, read_manifest
from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_duration

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
