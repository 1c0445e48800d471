"""`validate`: the cost model scored on a table of training runs, of collectives, or of pipeline bubbles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from shardwise.accuracy import bubbles, collectives, runs
from shardwise.accuracy.bubbles import ScoredBubble, score_bubbles
from shardwise.accuracy.collectives import ScoredRow, score_all_reduces
from shardwise.accuracy.runs import PublishedRun, measured_run
from shardwise.accuracy.scores import ErrorSummary, NotScored, ScoredRuns, score_runs, scored, summarize_errors
from shardwise.accuracy.table import FOLDER, SCORED, TRAINING_RUNS, columns_of, table_path
from shardwise.api.quantities import path_text
from shardwise.api.results import Result, Rows
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.interop.jobs import read_job
from shardwise.report.compare import errors_page, runs_data, runs_page
from shardwise.report.console import all_fields, picked
from shardwise.report.page import Page
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.lines import read_lines, summarise
from shardwise.spec.errors import SpecError

Kind = Literal["runs", "bubbles", "collectives"]
_COLUMNS: dict[Kind, Any] = {"runs": runs.COLUMNS, "bubbles": bubbles.COLUMNS, "collectives": collectives.COLUMNS}


@dataclass(frozen=True)
class RunScores(ScoredRuns, Result):
    """Training runs, scored."""

    verb = "validate"
    kind: Kind = "runs"

    @cached_property
    def page(self) -> Page:
        return runs_page(self)

    def _data(self) -> dict[str, Any]:
        return runs_data(self)

    def tables(self) -> Mapping[str, Rows]:
        by_device = [{"device": device, **all_fields(summary)} for device, summary in self.by_device.items()]
        return {**picked(self, "rows"), "by_device": by_device, **picked(self, "coverage", "choices", "not_scored")}


@dataclass(frozen=True)
class ErrorScores(Result):
    """Collectives or pipeline bubbles, scored: every row, and the absolute errors of each group and overall."""

    verb = "validate"
    kind: Kind
    rows: tuple[ScoredRow, ...] | tuple[ScoredBubble, ...]
    summary: Mapping[str, ErrorSummary]

    @cached_property
    def page(self) -> Page:
        return errors_page(self.kind, self.rows, self.summary)

    def _data(self) -> dict[str, Any]:
        rows = [{**all_fields(row), "error": row.error} for row in self.rows]
        return {"rows": rows, **picked(self, "summary")}

    def tables(self) -> Mapping[str, Rows]:
        summary = [{"group": name, **all_fields(errors)} for name, errors in self.summary.items()]
        return {"rows": self.to_dict()["rows"], "summary": summary}


def validate(table: str | PathLike[str] | None = None) -> RunScores | ErrorScores:
    """Scores the cost model on a table or on your own runs.

    A table is one of the package's (`SCORED`), or a CSV in the layout of one of them; by default all published training
    runs. Own runs are the folder of a run, or a folder that contains such folders at any depth.
    """
    if table is None:
        return _scores(score_runs(TRAINING_RUNS))
    named = path_text(table, "table")
    if _is_folder(named):
        return _scores(scored(*_own_runs(Path(named))))
    path = str(table_path(named))
    kind = _kind(path)
    if kind == "runs":
        return _scores(score_runs((path,)))
    if kind == "collectives":
        reduced = tuple(score_all_reduces(path))
        return ErrorScores(kind, reduced, _summary((row.machine, row.error) for row in reduced))
    idle = tuple(score_bubbles(path))
    return ErrorScores(kind, idle, _summary((row.schedule, row.error) for row in idle))


def _is_folder(named: str) -> bool:
    try:
        return named not in SCORED and Path(named).is_dir()
    except (OSError, ValueError):
        return False  # reading it as a table gives the error


def _own_runs(root: Path) -> tuple[list[PublishedRun], list[NotScored]]:
    """Runs that `train` or a callback recorded, by their folders; an error if none has a step to score."""
    # os.walk skips folders that are removed meanwhile.
    below = (Path(folder) for folder, _, files in os.walk(root) if "job.yaml" in files)
    folders = [root] if (root / "job.yaml").is_file() else sorted(below)
    runs: list[PublishedRun] = []
    refused: list[NotScored] = []
    for folder in folders:
        name = str(root) if folder == root else folder.relative_to(root).as_posix()
        try:
            runs.append(_own_run(name, RunFolder(folder)))
        except SpecError as error:
            refused.append(NotScored(name, str(error)))
        except OSError as error:
            refused.append(NotScored(name, f"cannot be read ({error.strerror})"))
    if not runs:
        problem = refused[0].reason if refused else "has no run's folder in it"
        raise SpecError(str(root), problem, "name the folder of a run, such as runs/demo")
    return runs, refused


def _own_run(name: str, folder: RunFolder) -> PublishedRun:
    """The run as a row to score: its job, and the medians of its steps."""
    job, measured = read_job(folder.job), summarise(read_lines(folder.metrics))
    if measured.step_seconds is None:
        raise SpecError(name, "has no measured step", "train it first")
    predict(job)
    peak_memory(job)  # both raise SpecError here for a job that cannot be priced any more
    return measured_run(name, job, measured.step_seconds, measured.memory_bytes)


def _scores(scored_runs: ScoredRuns) -> RunScores:
    return RunScores(**{item.name: getattr(scored_runs, item.name) for item in fields(scored_runs)})


def _summary(errors: Any) -> dict[str, ErrorSummary]:
    pairs = list(errors)
    if not pairs:
        raise SpecError("table", "has no rows that can be scored", f"compare it with {FOLDER}")
    return summarize_errors(pairs)


def _kind(path: str) -> Kind:
    """What the table holds: the kind of which it has the largest share of columns."""
    present = set(columns_of(path))
    return max(_COLUMNS, key=lambda name: len(present.intersection(_COLUMNS[name])) / len(_COLUMNS[name]))
