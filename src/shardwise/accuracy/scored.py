"""Whole tables of published runs, scored: every row, errors by device, error bars, the choice of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.accuracy.choices import ChoiceSummary, LayoutChoice, choice_summary, choices
from shardwise.accuracy.ranges import predicted_range
from shardwise.accuracy.runs import PublishedRun, run_from_row, run_rows
from shardwise.accuracy.scores import Score, Summary, score, summarize, summary
from shardwise.accuracy.table import table_path
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.spec.errors import SpecError


@dataclass(frozen=True)
class NotScored:
    """A row that cannot be read or priced, and why."""

    row_id: str
    reason: str


def published_runs(tables: Iterable[str]) -> tuple[list[PublishedRun], list[NotScored]]:
    """The runs of tables, by name or path, that can be priced, and the rows that cannot; an error if none can."""
    runs: list[PublishedRun] = []
    refused: list[tuple[NotScored, SpecError]] = []
    for row in (row for table in tables for row in run_rows(table_path(table))):
        try:
            run = run_from_row(row)
            predict(run.job), peak_memory(run.job)
            runs.append(run)
        except SpecError as error:
            refused.append((NotScored(row.text("row_id"), str(error)), error))
    if not runs:
        raise refused[0][1]
    return runs, [row for row, _ in refused]


@dataclass(frozen=True)
class ScoredRuns:
    """Every row, and the errors of every device; ``total`` of all rows that count.

    ``coverage`` says by class how many reports lie in the error bar that `plan` gives such a job; ``choices`` how well
    the prediction chooses among layouts of one job; ``not_scored`` are rows that cannot be read or priced.
    """

    rows: tuple[Score, ...]
    by_device: Mapping[str, Summary]
    total: Summary | None
    coverage: tuple[Coverage, ...]
    choices: tuple[LayoutChoice, ...]
    choice: ChoiceSummary | None
    not_scored: tuple[NotScored, ...]


def score_runs(tables: Iterable[str]) -> ScoredRuns:
    """The runs of tables, by name or path."""
    return scored(*published_runs(tables))


def scored(published: Sequence[PublishedRun], not_scored: Sequence[NotScored] = ()) -> ScoredRuns:
    """Runs that can be priced."""
    scores = [score(run, predicted_range(run)) for run in published]
    counted = [row for row in scores if not row.set_aside]
    chosen = choices(published, {row.row_id: row.predicted_seconds for row in scores})
    return ScoredRuns(
        rows=tuple(scores),
        by_device=summarize(scores),
        total=summary(counted) if counted else None,
        coverage=tuple(coverage(scores)),
        choices=tuple(chosen),
        choice=choice_summary(chosen),
        not_scored=tuple(not_scored),
    )


@dataclass(frozen=True)
class Coverage:
    """How many of the reports of one class, of step time or of memory, lie in the error bar that such a job gets."""

    what: str
    of: str
    rows: int
    in_bar: float


def coverage(scores: Iterable[Score]) -> list[Coverage]:
    """Of every class of bars, in order of appearance, then of all; rows that are set aside do not count."""
    inside_by_class: dict[tuple[str, str], list[bool]] = {}
    for row in (row for row in scores if not row.set_aside):
        for what, of, inside in (
            ("step time", row.bar_of, row.in_bar),
            ("memory", row.memory_bar_of, row.memory_in_bar),
        ):
            if inside is not None:
                inside_by_class.setdefault((what, of), []).append(inside)
                inside_by_class.setdefault((what, "all"), []).append(inside)
    ordered = sorted(inside_by_class.items(), key=lambda item: (item[0][0] == "memory", item[0][1] == "all"))
    return [Coverage(what, of, len(own), sum(own) / len(own)) for (what, of), own in ordered]
