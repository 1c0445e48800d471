"""`report`: a job or a run as one HTML file with every picture, and the tables under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from shardwise.api.campaign import CampaignArguments, campaign_of
from shardwise.api.given import JobArguments, JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import decided_job
from shardwise.api.planning import plan
from shardwise.api.quantities import amount, exclusive, path_text, require_writable, write_text
from shardwise.api.results import Result
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.launch.observe.state import RunObserver, RunState, as_data
from shardwise.layout.views import is_unlike
from shardwise.planner.advice.assessment import Assessment, assess
from shardwise.planner.candidate import candidate
from shardwise.report.analysis import headline
from shardwise.report.charts.chart import Chart
from shardwise.report.charts.job import MOST_PASSES
from shardwise.report.charts.plan import measured_words, same_strategy
from shardwise.report.charts.sections import ChartSection, PlanPictures, RunPictures, job_sections, run_sections
from shardwise.report.console import picked
from shardwise.report.html import report_html
from shardwise.report.page import Line, Page
from shardwise.report.status import state_words
from shardwise.report.verdict import JobVerdict, verdict_of, verdict_table
from shardwise.run.checkpoint.folder import NEWEST, RunFolder, run_folder
from shardwise.run.metrics.lines import RunSummary, read_lines, summarise
from shardwise.spec.bare import Size
from shardwise.spec.errors import SpecError, in_flags
from shardwise.spec.installation import is_installed
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_decimal_bytes

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class ReportResult(Result):
    """The pictures of a job or a run."""

    verb = "report"
    title: str
    assessment: Assessment
    sections: tuple[ChartSection, ...]
    notes: tuple[str, ...] = ()
    path: Path | None = None
    """The file that was written."""
    measured: RunSummary | None = None
    """What a run recorded."""
    state: RunState | None = None
    """How the run goes or ended, if it recorded events."""

    @cached_property
    def verdict(self) -> JobVerdict:
        return verdict_of(self.assessment)

    @property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(chart for section in self.sections for chart in section.charts)

    @cached_property
    def html(self) -> str:
        """The whole file."""
        return report_html(self.title, self.verdict, self._facts(), self.sections, self.notes)

    def _facts(self) -> list[tuple[str, str]]:
        """The job, what was measured of it, and the verdict as `analyze` prints it."""
        priced = zip(("Job", "Layout", "Batch"), headline(self.assessment.analysis).split("\n"))
        ended = [] if self.state is None else [("Run", _end_words(self.state))]
        measured = [] if self.measured is None else [*ended, ("Measured", measured_words(self.measured))]
        predicted = ((str(name), str(what)) for name, what in verdict_table(self.assessment).rows)
        return [*priced, *measured, *predicted]

    @cached_property
    def page(self) -> Page:
        size = readable_decimal_bytes(len(self.html.encode()))
        where = "" if self.path is None else f"wrote {self.path}: {counted(len(self.charts), 'chart')}, {size}"
        missing = [f"not drawn: {note}" for section in self.sections for note in section.notes]
        return Page.of([Line(self.verdict.sentence, "bold"), *missing, *filter(None, [where])])

    def _data(self) -> dict[str, Any]:
        return {
            **picked(self, "title", "verdict"),
            "charts": {chart.name: chart.to_dict() for chart in self.charts},
            "not_drawn": [note for section in self.sections for note in section.notes],
            "notes": list(self.notes),
            "run": None if self.state is None else as_data(self.state),
            "path": None if self.path is None else str(self.path),
        }


def write_report(
    job: JobSource | None = None,
    *,
    out: str | PathLike[str] | None = "report.html",
    search: bool = True,
    time_limit: Size | None = None,
    tokens: Size | None = None,
    price: Size | None = None,
    mtbf: Size | None = None,
    checkpoint_seconds: Size | None = None,
    restart_seconds: Size | None = None,
    on_progress: OnProgress | None = None,
    **keywords: Unpack[JobKeywords],
) -> ReportResult:
    """A job, or the folder of a run, as one HTML file with every picture; ``out=None`` writes nothing.

    ``search`` plans for the same model, cluster and batch, to show the job among other strategies; ``time_limit`` is
    that of `plan`. The rest is as for `analyze`.
    """
    path = None if out is None else Path(path_text(out, "⟨out⟩"))
    if path is not None:
        require_writable(path, "⟨out⟩")
    if time_limit is not None:
        amount(time_limit, "seconds", "⟨time_limit⟩", "10min")
        if not search:
            raise exclusive("⟨time_limit⟩", time_limit, "⟨search=false⟩")
    tell = on_progress or (lambda text: None)
    asked = job_arguments(job, keywords)
    folder = _run_of(asked)
    made, notes = decided_job(asked if folder is None else replace(asked, file=str(folder.job)))
    tell("pricing")
    analysis = analyze_job(made)
    run = CampaignArguments(tokens, price, mtbf, checkpoint_seconds, restart_seconds)
    assessment = assess(
        analysis,
        campaign=campaign_of(run, made, analysis.predicted_seconds),
        scaling=not is_unlike(made),
        over_time=3 * made.microbatches * made.strategy.stages <= MOST_PASSES,
    )
    searched = (
        _searched(made, time_limit, tell)
        if search
        else PlanPictures(why_not="other strategies were not searched for (--no-search)")
    )
    sections = job_sections(assessment, searched)
    title = f"{made.model.name} on {made.cluster.name}"
    summary = state = None
    if folder is not None:
        tell("reading the run")
        records = list(read_lines(folder.metrics))
        summary = summarise(records)
        sections = [*run_sections(RunPictures(records, summary, *_comparison(folder)), made), *sections]
        state = RunObserver(folder).state() if folder.events.is_file() else None
        title = f"{folder.path.resolve().name}: {title}"
    result = ReportResult(title, assessment, tuple(sections), (*notes, *analysis.notes), path, summary, state)
    if path is not None:
        write_text(path, result.html, "⟨out⟩")
    return result


def _end_words(state: RunState) -> str:
    restarts = f", {counted(state.restarts, 'restart')}" if state.restarts else ""
    return f"{state_words(state)}{restarts}{f': {state.why}' if state.why else ''}"


def _run_of(asked: JobArguments) -> RunFolder | None:
    """The folder of a run, if one is given in place of a job file."""
    if asked.file is None:
        return None
    path = Path(asked.file)
    try:
        is_folder = path.is_dir() or (path.name == NEWEST and not path.exists())
    except (OSError, ValueError):
        return None  # reading it as a job file gives the error
    if is_folder and not asked.overrides:
        return run_folder(asked.file)
    if is_folder:
        raise SpecError("report", "flags do not change a run that was trained", "leave them out, or give its job.yaml")
    return None


def _searched(job: Job, time_limit: Size | None, tell: OnProgress) -> PlanPictures:
    """The plan for the same model, cluster and batch, or why there is none."""
    if is_unlike(job):
        return PlanPictures(why_not="jobs on several kinds of nodes are planned by `shardwise plan`")
    try:
        answer = plan(job, pareto="memory", time_limit=time_limit, on_progress=tell).answer
    except SpecError as error:
        return PlanPictures(why_not=in_flags(error.line))
    own = same_strategy(answer.plan, job) or candidate(job)
    best = answer.plan.best
    marked = None if own.job.strategy == best.job.strategy else own
    return PlanPictures(answer.plan, answer.memory_front or (), marked)


def _comparison(folder: RunFolder) -> tuple[Comparison | None, str]:
    if not folder.profile.is_dir():
        return None, "the parts of a step: no step was profiled (`shardwise train --profile steps=10:12`)"
    if not is_installed("torch"):
        return None, "the parts of a step: PyTorch, which reads its profile, is not installed"
    from shardwise.measure.compare.comparison import compare, profiled_run

    try:
        return compare(profiled_run(str(folder.path))), ""
    except SpecError as error:
        return None, f"the parts of a step: {in_flags(error.line)}"
