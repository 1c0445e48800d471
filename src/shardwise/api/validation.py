"""`validate`: the cost model scored on a table of training runs, of collectives, or of pipeline bubbles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from os import PathLike, fspath
from typing import Any, Literal

from shardwise.api.results import Result, Rows
from shardwise.cost.accuracy import bubbles, collectives, runs
from shardwise.cost.accuracy.bubbles import ScoredBubble, score_bubbles
from shardwise.cost.accuracy.collectives import ScoredRow, score_all_reduces
from shardwise.cost.accuracy.scored import ScoredRuns, score_runs
from shardwise.cost.accuracy.scores import ErrorSummary, summarize_errors
from shardwise.cost.accuracy.table import FOLDER, TRAINING_RUNS, columns_of, table_path
from shardwise.report.page import Page
from shardwise.report.validation import errors_data, errors_page, runs_data, runs_page
from shardwise.spec.errors import SpecError

Kind = Literal["runs", "bubbles", "collectives"]
_COLUMNS: dict[Kind, Any] = {"runs": runs.COLUMNS, "bubbles": bubbles.COLUMNS, "collectives": collectives.COLUMNS}


@dataclass(frozen=True)
class RunScores(ScoredRuns, Result):
    """Training runs, scored."""

    kind: Kind = "runs"

    @cached_property
    def page(self) -> Page:
        return runs_page(self)

    def to_dict(self) -> dict[str, Any]:
        return runs_data(self)

    def tables(self) -> Mapping[str, Rows]:
        by_device = [{"device": device, **asdict(one)} for device, one in self.by_device.items()]
        others = {name: [asdict(one) for one in getattr(self, name)] for name in ("coverage", "choices", "not_scored")}
        return {"rows": [asdict(one) for one in self.rows], "by_device": by_device, **others}


@dataclass(frozen=True)
class ErrorScores(Result):
    """Collectives or pipeline bubbles, scored: every row, and the absolute errors of every group and of all."""

    kind: Kind
    rows: tuple[ScoredRow, ...] | tuple[ScoredBubble, ...]
    summary: Mapping[str, ErrorSummary]

    @cached_property
    def page(self) -> Page:
        return errors_page(self.kind, self.rows, self.summary)

    def to_dict(self) -> dict[str, Any]:
        return errors_data(self.rows, self.summary)

    def tables(self) -> Mapping[str, Rows]:
        summary = [{"group": name, **asdict(one)} for name, one in self.summary.items()]
        return {"rows": self.to_dict()["rows"], "summary": summary}


def validate(table: str | PathLike[str] | None = None) -> RunScores | ErrorScores:
    """Scores the cost model on a table: one of the package's (`SCORED`), or a CSV in the layout of one of them.

    Without a table, on all published training runs of the package.
    """
    if table is None:
        return _runs(TRAINING_RUNS)
    path = str(table_path(fspath(table)))
    kind = _kind(path)
    if kind == "runs":
        return _runs((path,))
    if kind == "collectives":
        reduced = tuple(score_all_reduces(path))
        return ErrorScores(kind, reduced, _summary((row.machine, row.error) for row in reduced))
    idle = tuple(score_bubbles(path))
    return ErrorScores(kind, idle, _summary((row.schedule, row.error) for row in idle))


def _runs(tables: Iterable[str]) -> RunScores:
    found = score_runs(tables)
    return RunScores(**{one.name: getattr(found, one.name) for one in fields(found)})


def _summary(errors: Any) -> dict[str, ErrorSummary]:
    pairs = list(errors)
    if not pairs:
        raise SpecError("table", "has no rows that can be scored", f"compare it with {FOLDER}")
    return summarize_errors(pairs)


def _kind(path: str) -> Kind:
    """What the table holds: the layout that shares most columns with it."""
    present = set(columns_of(path))
    return max(_COLUMNS, key=lambda name: len(present.intersection(_COLUMNS[name])) / len(_COLUMNS[name]))
