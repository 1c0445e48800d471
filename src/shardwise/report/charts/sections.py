"""Which pictures a report has, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.candidate import Candidate
from shardwise.planner.plan import Plan
from shardwise.report.charts.chart import Chart
from shardwise.report.charts.memory import memory_chart, memory_over_time_chart
from shardwise.report.charts.mesh import mesh_chart
from shardwise.report.charts.plan import pareto_chart, ranking_chart
from shardwise.report.charts.roofline import roofline_chart
from shardwise.report.charts.run import (
    Records,
    comparison_chart,
    loss_chart,
    memory_comparison_chart,
    memory_prediction_chart,
    step_prediction_chart,
    throughput_chart,
)
from shardwise.report.charts.step import communication_chart, levels_chart, step_chart
from shardwise.report.charts.timeline import timeline_chart
from shardwise.report.charts.whole_run import campaign_chart, scaling_chart
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison
    from shardwise.run.metrics.lines import RunSummary


@dataclass(frozen=True)
class ChartSection:
    """Charts under a heading; ``notes`` say what is not drawn, and why."""

    title: str
    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()


def section(title: str, charts: Iterable[Chart | None], notes: Iterable[str] = ()) -> ChartSection:
    return ChartSection(title, tuple(one for one in charts if one is not None), tuple(filter(None, notes)))


def job_sections(found: Assessment, searched: PlanPictures) -> list[ChartSection]:
    """The pictures of a job that is priced: where it runs, its step, its memory, its communication, and the rest."""
    analysis, job = found.analysis, found.analysis.job
    timeline, over_time = timeline_chart(job), found.memory_over_time
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
        section("Other strategies", searched.charts(job), [searched.why_not]),
    ]
    if found.scaling is not None and any(found.scaling.values()):
        sections.append(section("Scaling", [scaling_chart(found.scaling)]))
    money = "" if found.campaign else "no tokens of the whole run are given (--tokens 15T, --price 2.5/h)"
    whole = [campaign_chart(found.campaign)] if found.campaign else []
    return [*sections, section("Cost and days", whole, [money])]


@dataclass(frozen=True)
class PlanPictures:
    """A plan for the same model, cluster and batch, with its front of time and memory; or why there is none."""

    plan: Plan | None = None
    front: Sequence[Candidate] = ()
    own: Candidate | None = None  # the job beside them
    why_not: str = ""

    def charts(self, job: Job) -> list[Chart]:
        if self.plan is None:
            return []
        return [pareto_chart(self.plan, self.front, self.own), ranking_chart(self.plan)]


@dataclass(frozen=True)
class RunPictures:
    """What a run has recorded; ``comparison`` of its profiled steps, or why there is none."""

    records: Records
    summary: RunSummary
    comparison: Comparison | None = None
    why_not: str = ""


def run_sections(run: RunPictures, job: Job) -> list[ChartSection]:
    compared: list[Any] = [step_prediction_chart(run.summary), memory_prediction_chart(run.summary)]
    if run.comparison is not None:
        compared += [comparison_chart(run.comparison), memory_comparison_chart(run.comparison)]
    return [
        section("Training", [loss_chart(run.records), throughput_chart(run.records, job)],
                [] if run.records else ["metrics.jsonl has no step"]),
        section("Predicted beside measured", compared, [run.why_not]),
    ]  # fmt: skip
