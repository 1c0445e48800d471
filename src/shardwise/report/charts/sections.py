"""Which pictures a report and ``--plot`` show, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.candidate import Candidate
from shardwise.planner.plan import Plan
from shardwise.report.analysis import headline
from shardwise.report.charts.chart import Chart
from shardwise.report.charts.devices import memory_chart, memory_over_time_chart, mesh_chart
from shardwise.report.charts.job import (
    campaign_chart,
    communication_chart,
    levels_chart,
    roofline_chart,
    scaling_chart,
    step_chart,
    timeline_chart,
    topologies_chart,
)
from shardwise.report.charts.plan import (
    Records,
    comparison_chart,
    loss_chart,
    memory_comparison_chart,
    memory_of_layouts_chart,
    memory_prediction_chart,
    pareto_chart,
    ranking_chart,
    step_prediction_chart,
    throughput_chart,
)
from shardwise.report.page import Line, Piece, paged
from shardwise.report.plot import Drawing
from shardwise.report.verdict import verdict_sentence
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison
    from shardwise.run.metrics.lines import RunSummary


@dataclass(frozen=True)
class ChartSection:
    title: str
    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()  # what is not drawn, and why


def section(title: str, charts: Iterable[Chart | None], notes: Iterable[str] = ()) -> ChartSection:
    return ChartSection(title, tuple(chart for chart in charts if chart is not None), tuple(filter(None, notes)))


def job_sections(assessment: Assessment, searched: PlanPictures) -> list[ChartSection]:
    """The pictures of a priced job: its mesh, step, memory, communication, and the rest."""
    analysis, job = assessment.analysis, assessment.analysis.job
    timeline, over_time = timeline_chart(job), assessment.memory_over_time
    undrawn = f"{job.microbatches:,} microbatches are too many passes to draw" if timeline is None else ""
    sending = bool(analysis.exposed_by_dimension())
    alone = "" if sending else "one device sends nothing"
    sections = [
        section("Mesh over nodes", [mesh_chart(job)]),
        section("Step", [step_chart(analysis), timeline], [undrawn]),
        section(
            "Memory",
            [memory_chart(analysis), None if over_time is None else memory_over_time_chart(over_time)],
            [undrawn if over_time is None else ""],
        ),
        section(
            "Communication",
            [communication_chart(analysis), levels_chart(analysis)] if sending else [],
            [alone],
        ),
        section("Roofline", [roofline_chart(job)]),
        section("Other strategies", searched.charts(), [searched.why_not]),
    ]
    if assessment.scaling is not None and any(assessment.scaling.values()):
        sections.append(section("Scaling", [scaling_chart(assessment.scaling)]))
    money = "" if assessment.campaign else "no tokens of the whole run are given (--tokens 15T, --price 2.5/h)"
    whole = [campaign_chart(assessment.campaign)] if assessment.campaign else []
    return [*sections, section("Cost and days", whole, [money])]


@dataclass(frozen=True)
class PlanPictures:
    """A plan for the job's model, cluster and batch, or why there is none."""

    plan: Plan | None = None
    front: Sequence[Candidate] = ()  # Pareto front of time and memory
    own: Candidate | None = None  # the job itself, if it is not the plan
    why_not: str = ""  # why there is no plan

    def charts(self) -> list[Chart]:
        if self.plan is None:
            return []
        return [pareto_chart(self.plan, self.front, self.own), ranking_chart(self.plan)]


@dataclass(frozen=True)
class RunPictures:
    records: Records
    summary: RunSummary
    comparison: Comparison | None = None  # the profiled steps beside their prediction
    why_not: str = ""  # why there is no comparison


def run_sections(run: RunPictures, job: Job) -> list[ChartSection]:
    compared: list[Any] = [step_prediction_chart(run.summary), memory_prediction_chart(run.summary)]
    if run.comparison is not None:
        compared += [comparison_chart(run.comparison), memory_comparison_chart(run.comparison)]
    return [
        section("Training", [loss_chart(run.records), throughput_chart(run.records, job)],
                [] if run.records else ["metrics.jsonl has no step"]),
        section("Predicted beside measured", compared, [run.why_not]),
    ]  # fmt: skip


# -- what --plot prints: the verdict of a verb, then its pictures in place of its tables -----------------


@paged
def analysis_plots(assessment: Assessment) -> Iterator[Piece | str]:
    yield f"{headline(assessment.analysis)}\n"
    yield Line(f"{verdict_sentence(assessment)}\n", "bold")
    yield from map(Drawing, _analysis_charts(assessment))


def _analysis_charts(assessment: Assessment) -> Iterator[Chart]:
    analysis, job = assessment.analysis, assessment.analysis.job
    yield step_chart(analysis)
    yield memory_chart(analysis)
    if assessment.memory_over_time is not None:
        yield memory_over_time_chart(assessment.memory_over_time)
    timeline = timeline_chart(job)
    if timeline is not None:
        yield timeline
    if analysis.exposed_by_dimension():
        yield communication_chart(analysis)
        yield levels_chart(analysis)
    yield roofline_chart(job)
    if assessment.scaling is not None and any(assessment.scaling.values()):
        yield scaling_chart(assessment.scaling)
    if assessment.topologies is not None:
        yield topologies_chart(assessment.topologies)
    if assessment.ranks is not None:
        yield mesh_chart(job)
    if assessment.campaign is not None:
        yield campaign_chart(assessment.campaign)


@paged
def plan_plots(answer: PlanAnswer, *, top: int) -> Iterator[Piece | str]:
    plan = answer.plan
    yield Line(f"{answer.explanation.sentence()}\n", "bold")
    yield Drawing(ranking_chart(plan, top))
    yield Drawing(memory_of_layouts_chart(plan, top))
    yield Drawing(pareto_chart(plan, plan.front))
    if answer.campaign is not None:
        yield Drawing(campaign_chart(answer.campaign))


@paged
def comparison_plots(comparison: Comparison) -> Iterator[Piece | str]:
    for chart in (comparison_chart(comparison), memory_comparison_chart(comparison)):
        if chart is not None:
            yield Drawing(chart)
