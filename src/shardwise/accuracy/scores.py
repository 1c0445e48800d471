"""Reported against predicted: row by row, by device, overall; and whether the prediction chooses well."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.accuracy import fine_tuning_runs
from shardwise.accuracy.ranges import Range, predicted_range
from shardwise.accuracy.runs import PublishedRun, counts_reserved, reported_rank, run_from_row, run_rows
from shardwise.accuracy.table import TableRow, columns_of, read_table, release, table_path
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.memory.room import allocated_bytes, fit_of, reserved_bytes
from shardwise.cost.step.prediction import predict
from shardwise.spec.errors import SpecError
from shardwise.uncertainty.residuals import error_bar, left_out_errors

# -- choices: published runs of one job in several layouts, as measured and predicted ----------------
# Rows are comparable only within a source and a release of its software.


@dataclass(frozen=True)
class LayoutChoice:
    """One job in several layouts.

    ``regret`` is how much slower than the fastest as measured the one is that is predicted to be the fastest;
    ``rank_correlation`` is Spearman's, None where all are predicted or measured to take as long.
    """

    source: str
    model: str
    device: str
    devices: int
    sequences: int
    layouts: int
    fastest: str
    chosen: str
    regret: float
    rank_correlation: float | None


def same_job(run: PublishedRun) -> Hashable:
    """What two rows share that differ in the strategy alone.

    The rows of another release ran other software; two slices joined by a data centre's network are another machine
    than one.
    """
    job = run.job
    software = (run.row.text("source"), release(run.row), job.stack.name)
    machine = (job.cluster.device.name, job.cluster.devices, job.cluster.levels)
    return (*machine, job.model, job.training, job.sequences, software)


def layouts_of_jobs(runs: Iterable[PublishedRun]) -> list[list[PublishedRun]]:
    """Runs with a time that differ in the strategy alone, together; of equal strategies the first."""
    jobs: dict[Hashable, list[PublishedRun]] = {}
    for run in runs:
        own = jobs.setdefault(same_job(run), [])
        is_known = any(run.job.strategy == earlier.job.strategy for earlier in own)
        if run.reported_seconds and not run.set_aside and not is_known:
            own.append(run)
    return [own for own in jobs.values() if len(own) > 1]


def choices(runs: Iterable[PublishedRun], predicted_seconds: Mapping[str, float]) -> list[LayoutChoice]:
    """Every job with several layouts, the largest regret first."""
    jobs = [_choice(own, [predicted_seconds[run.row_id] for run in own]) for own in layouts_of_jobs(runs)]
    return sorted(jobs, key=lambda choice: -choice.regret)


def _choice(runs: Sequence[PublishedRun], predicted: Sequence[float]) -> LayoutChoice:
    measured = [run.reported_seconds or 0.0 for run in runs]
    chosen, fastest = (min(range(len(runs)), key=list(times).__getitem__) for times in (predicted, measured))
    first = runs[chosen]
    return LayoutChoice(
        source=first.source.name,
        model=first.model_name,
        device=first.device,
        devices=first.job.cluster.devices,
        sequences=first.job.sequences,
        layouts=len(runs),
        fastest=runs[fastest].row_id,
        chosen=first.row_id,
        regret=measured[chosen] / measured[fastest] - 1,
        rank_correlation=rank_correlation(predicted, measured),
    )


@dataclass(frozen=True)
class ChoiceSummary:
    """Over all jobs: mean and worst regret, and the mean rank correlation of those that have one."""

    jobs: int
    mean_regret: float
    worst_regret: float
    mean_rank_correlation: float | None


def choice_summary(choices: Sequence[LayoutChoice]) -> ChoiceSummary | None:
    if not choices:
        return None
    regrets = [choice.regret for choice in choices]
    correlations = [choice.rank_correlation for choice in choices if choice.rank_correlation is not None]
    mean = sum(correlations) / len(correlations) if correlations else None
    return ChoiceSummary(len(choices), sum(regrets) / len(regrets), max(regrets), mean)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: the correlation of the ranks, of equal values their mean rank; None if all of either are equal."""
    first_ranks, second_ranks = _ranks(first), _ranks(second)
    middle = (len(first_ranks) + 1) / 2
    together = sum((a - middle) * (b - middle) for a, b in zip(first_ranks, second_ranks, strict=True))
    spread, other_spread = (sum((rank - middle) ** 2 for rank in ranks) for ranks in (first_ranks, second_ranks))
    return together / (spread * other_spread) ** 0.5 if spread and other_spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


# -- scores ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorSummary:
    """Mean and worst absolute error, as fractions."""

    rows: int
    mean: float
    worst: float


def summarize_errors(errors: Iterable[tuple[str, float]]) -> dict[str, ErrorSummary]:
    """Summaries of (group, error) pairs: every group in order of appearance, then ``all``."""
    groups: dict[str, list[float]] = {}
    every = []
    for name, error in errors:
        groups.setdefault(name, []).append(abs(error))
        every.append(abs(error))
    groups["all"] = every
    return {name: ErrorSummary(len(own), sum(own) / len(own), max(own)) for name, own in groups.items()}


@dataclass(frozen=True)
class Score:
    """One run, scored; errors are fractions of what was reported.

    ``predicted_seconds_low`` and ``high`` span the plausible values of what the source does not print. ``bar_*`` are
    the ends of the error bar that `plan` gives such a job; ``bar_of`` and ``memory_bar_of`` name the class it is of.
    ``left_out_error`` is the error with the row's source left out of the fit, for rows that the fit may know.
    """

    row_id: str
    device: str
    model: str
    source: str
    reported_from: str
    reported_seconds: float | None
    predicted_seconds: float
    time_error: float | None
    left_out_error: float | None
    assumed: tuple[str, ...]
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    in_range: bool | None
    bar_low_seconds: float
    bar_high_seconds: float
    in_bar: bool | None
    bar_of: str
    reported_memory_bytes: float | None
    predicted_memory_bytes: float
    memory_error: float | None
    memory_kind: str
    bar_low_bytes: float
    bar_high_bytes: float
    memory_in_bar: bool | None
    memory_bar_of: str
    fits: bool
    set_aside: str


def score(run: PublishedRun, over: Range | None = None) -> Score:
    """The prediction for one run beside what was reported of it, and the range if it is given."""
    seconds, time = predict(run.job).step_seconds, run.reported_seconds
    predicted, reported = predicted_memory(run), run.reported_memory_bytes
    bar = error_bar(run.job)
    low, high = seconds * (1 + bar.time_low), seconds * (1 + bar.time_high)
    least, most = predicted * (1 + bar.memory_low), predicted * (1 + bar.memory_high)
    return Score(
        row_id=run.row_id,
        device=run.device,
        model=run.model_name,
        source=run.source.name,
        reported_from=run.reported_from,
        reported_seconds=time,
        predicted_seconds=seconds,
        time_error=None if time is None else seconds / time - 1,
        left_out_error=left_out_errors().get(run.row_id),
        assumed=over.fields if over else (),
        predicted_seconds_low=over.low if over else None,
        predicted_seconds_high=over.high if over else None,
        in_range=over.low <= time <= over.high if over and time is not None else None,
        bar_low_seconds=low,
        bar_high_seconds=high,
        in_bar=None if time is None else low <= time <= high,
        bar_of=bar.time_of,
        reported_memory_bytes=reported,
        predicted_memory_bytes=predicted,
        memory_error=None if reported is None else predicted / reported - 1,
        memory_kind=run.memory_kind,
        bar_low_bytes=least,
        bar_high_bytes=most,
        memory_in_bar=None if reported is None else least <= reported <= most,
        memory_bar_of=bar.memory_of,
        fits=fit_of(run.job) != "does not fit",
        set_aside=run.set_aside,
    )


def predicted_memory(run: PublishedRun) -> float:
    """What the figure of a run counts: tensors, or what the allocator reserves for them.

    Of the framework's allowance only workspaces are a part of it.
    """
    rank = reported_rank(run.memory_kind, run.source, run.job.strategy.pp)
    memory = peak_memory(run.job) if rank is None else memory_of_rank(run.job, rank)
    if "nvidia-smi" in run.memory_kind:  # the whole process
        return reserved_bytes(run.job, memory) + memory.allowance
    if counts_reserved(run.memory_kind, run.source):
        return reserved_bytes(run.job, memory)
    return allocated_bytes(run.job, memory)


@dataclass(frozen=True)
class Summary:
    """Mean and worst absolute error and bias over the rows of one device that are not set aside.

    ``left_out_mape`` is the mean with each row's source left out of the fit, of rows that the fit may know.
    Of ``ranged_rows`` rows with something assumed, ``in_range`` is the share whose range contains the report.
    """

    rows: int
    time_mape: float | None
    time_worst: float | None
    time_bias: float | None
    left_out_mape: float | None
    memory_mape: float | None
    memory_worst: float | None
    ranged_rows: int
    in_range: float | None


def summarize(scores: Iterable[Score]) -> dict[str, Summary]:
    """Per device, in the order of the table; a device of which every row is set aside is left out."""
    by_device: dict[str, list[Score]] = {}
    for row in scores:
        if not row.set_aside:
            by_device.setdefault(row.device, []).append(row)
    return {device: summary(own) for device, own in by_device.items()}


def summary(scores: list[Score]) -> Summary:
    times = [row.time_error for row in scores if row.time_error is not None]
    left_out = [row.left_out_error for row in scores if row.left_out_error is not None]
    memories = [abs(row.memory_error) for row in scores if row.memory_error is not None]
    ranged = [row.in_range for row in scores if row.in_range is not None]
    return Summary(
        rows=len(scores),
        time_mape=sum(map(abs, times)) / len(times) if times else None,
        time_worst=max(map(abs, times)) if times else None,
        time_bias=sum(times) / len(times) if times else None,
        left_out_mape=sum(map(abs, left_out)) / len(left_out) if left_out else None,
        memory_mape=sum(memories) / len(memories) if memories else None,
        memory_worst=max(memories) if memories else None,
        ranged_rows=len(ranged),
        in_range=sum(ranged) / len(ranged) if ranged else None,
    )


# -- whole tables of published runs ------------------------------------------------------------------


@dataclass(frozen=True)
class NotScored:
    """A row that cannot be read or priced, and why."""

    row_id: str
    reason: str


def published_runs(tables: Iterable[str]) -> tuple[list[PublishedRun], list[NotScored]]:
    """The runs of tables, by name or path, that can be priced, and the rows that cannot; an error if none can."""
    runs: list[PublishedRun] = []
    refused: list[tuple[NotScored, SpecError]] = []
    for row, read in (pair for table in tables for pair in _rows(str(table_path(table)))):
        try:
            run = read(row)
            predict(run.job), peak_memory(run.job)
            runs.append(run)
        except SpecError as error:
            refused.append((NotScored(row.text("row_id"), str(error)), error))
    if not runs:
        raise refused[0][1]
    return runs, [row for row, _ in refused]


def _rows(path: str) -> Iterator[tuple[TableRow, Callable[[TableRow], PublishedRun]]]:
    """Every row of a table, and what reads it as a run: of pre-training, or of fine-tuning."""
    if set(fine_tuning_runs.COLUMNS) <= set(columns_of(path)):
        yield from ((row, fine_tuning_runs.run_from_row) for row in read_table(path, fine_tuning_runs.COLUMNS, "runs"))
    else:
        yield from ((row, run_from_row) for row in run_rows(path))


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
