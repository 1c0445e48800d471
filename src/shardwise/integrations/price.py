"""Prices a framework's run before its first step: the verdict to print, and whether the run may start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from shardwise.api.analysis import AnalysisResult
from shardwise.api.planning import plan
from shardwise.cost.analysis import analyze
from shardwise.integrations.layout import Ranks, RunLayout, cluster_for, job_of
from shardwise.integrations.module import ModuleFacts, NotPriced, Sequences, module_facts, sequences_of
from shardwise.launch.preflight import require_fits
from shardwise.planner.advice.assessment import assess
from shardwise.planner.describe import strategy_words
from shardwise.report.charts.verdict import verdict_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.run import LearningRateSchedule
from shardwise.spec.units import readable_seconds

FOLDER = "shardwise"  # in the folder of a framework's run
WORTH_SAYING = 0.05  # share of the step that a faster layout saves
_SEARCH_SECONDS = 10.0

OnMisfit = Literal["warn", "stop"]


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What a user gives; the rest is read from the framework."""

    seq: int | None = None
    """Tokens of a padded example."""
    cluster: Any = None
    """The machine; None: the GPUs of this one."""
    model: Any = None
    """Describes a network without a Hugging Face config."""
    folder: str | PathLike[str] | None = None
    """Where the run is recorded."""
    on_misfit: OnMisfit = "warn"
    """What to do about a run that is not known to fit: print a warning, or stop it before its first step."""

    def __post_init__(self) -> None:
        if self.on_misfit not in ("warn", "stop"):
            raise SpecError("on_misfit", f"{shown(self.on_misfit)} is not known", 'use "warn" or "stop"')
        if self.seq is not None and (isinstance(self.seq, bool) or not isinstance(self.seq, int) or self.seq < 1):
            raise SpecError("seq", f"{shown(self.seq)} is not a number of tokens", "write one like 2048")

    def folder_in(self, root: str | PathLike[str]) -> Path:
        return Path(root) / FOLDER if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class FrameworkRun:
    """A run that its framework is about to start."""

    framework: str
    """In words."""
    module: Any
    optimizer: Any
    loader: Any
    settings: tuple[Any, ...]
    """Objects that may know the length of a sequence."""
    layout: Callable[[], RunLayout]
    ranks: Ranks
    is_main: bool
    folder: Path
    first_step: int
    steps: int | None


@dataclass(frozen=True)
class PricedRun:
    """The job that the framework runs, its price, and what was assumed."""

    result: AnalysisResult
    sequences: Sequences
    layout: RunLayout
    facts: ModuleFacts
    notes: tuple[str, ...]

    @property
    def job(self) -> Job:
        return self.result.job

    def lines(self) -> Iterator[str]:
        """The verdict, what was priced, and what is worth changing."""
        job, assessment = self.job, self.result.assessment
        yield verdict_of(assessment).sentence
        rows = f"{job.strategy.microbatch} × {job.microbatches} × {job.strategy.data_parallel}"
        batch = f"batch {rows} = {job.sequences:,} sequences of {job.training.seq:,} tokens ({self.sequences.said_by})"
        yield f"{strategy_words(job.strategy)}; {batch}"
        yield f"{job.training.precision}, {job.training.optimizer}; priced on the stack {job.stack.name}"
        yield from self.notes
        yield self._advice()

    def _advice(self) -> str:
        """A layout of the same framework that is faster, or that fits where this one does not."""
        fits, seconds = self.result.fits, self.result.predicted_seconds
        try:
            best = plan(self.job, framework=self.layout.framework, time_limit=_SEARCH_SECONDS)
        except SpecError as error:
            return f"no layout of {self.layout.framework} was found that fits: {error}"
        took = f"{readable_seconds(best.predicted_seconds)} a step"
        if not fits:
            return f"this would fit: {strategy_words(best.job.strategy)} ({took})"
        if best.predicted_seconds > seconds * (1 - WORTH_SAYING):
            return f"no layout of {self.layout.framework} is more than {WORTH_SAYING:.0%} faster"
        return f"faster: {strategy_words(best.job.strategy)} ({took} instead of {readable_seconds(seconds)})"


def priced(run: FrameworkRun, options: WatchOptions) -> PricedRun:
    """Raises NotPriced for what has no price, DoesNotFit if the options stop such a run, SpecError for a mistake."""
    facts = module_facts(run.module, options.model)
    sequences = sequences_of(options.seq, run.loader, *run.settings)
    cluster, notes = cluster_for(options.cluster, run.ranks)
    layout = run.layout()
    job, more = job_of(layout, facts, sequences, run.optimizer, cluster)
    recorded = replace(job.run, steps=max(1, run.steps or job.run.steps), folder=str(run.folder))
    job = replace(job, run=replace(recorded, schedule=LearningRateSchedule(warmup=0)))
    analysis = analyze(job)
    if options.on_misfit == "stop":
        require_fits(job)
    result = AnalysisResult(assess(analysis, advice=False), tuple(analysis.notes))
    return PricedRun(result, sequences, layout, facts, (*notes, *more, *analysis.notes))


def priced_or_why_not(run: FrameworkRun, options: WatchOptions) -> tuple[PricedRun | None, str]:
    """The price, or why there is none; raises NotPriced instead if only a run that fits may start."""
    try:
        return priced(run, options), ""
    except NotPriced as error:
        if options.on_misfit == "stop":
            raise
        return None, str(error)
