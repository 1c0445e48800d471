"""What ``--plot`` prints: the verdict of a verb, then its pictures in place of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.assessment import Assessment
from shardwise.report.analysis import headline
from shardwise.report.charts.chart import Chart
from shardwise.report.charts.memory import memory_chart, memory_over_time_chart
from shardwise.report.charts.mesh import mesh_chart
from shardwise.report.charts.plan import memory_of_layouts_chart, pareto_chart, ranking_chart
from shardwise.report.charts.roofline import roofline_chart
from shardwise.report.charts.run import comparison_chart, memory_comparison_chart
from shardwise.report.charts.step import communication_chart, levels_chart, step_chart
from shardwise.report.charts.timeline import timeline_chart
from shardwise.report.charts.topologies import topologies_chart
from shardwise.report.charts.verdict import verdict_sentence
from shardwise.report.charts.whole_run import campaign_chart, scaling_chart
from shardwise.report.page import Line, Piece, paged
from shardwise.report.plot.drawing import Drawing

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison


@paged
def analysis_plots(found: Assessment) -> Iterator[Piece | str]:
    yield f"{headline(found.analysis)}\n"
    yield Line(f"{verdict_sentence(found)}\n", "bold")
    yield from map(Drawing, _analysis_charts(found))


def _analysis_charts(found: Assessment) -> Iterator[Chart]:
    analysis, job = found.analysis, found.analysis.job
    yield step_chart(analysis)
    yield memory_chart(analysis)
    if found.memory_over_time is not None:
        yield memory_over_time_chart(found.memory_over_time)
    timeline = timeline_chart(job)
    if timeline is not None:
        yield timeline
    if analysis.exposed_by_dimension():
        yield communication_chart(analysis)
        yield levels_chart(analysis)
    yield roofline_chart(job)
    if found.scaling is not None and any(found.scaling.values()):
        yield scaling_chart(found.scaling)
    if found.topologies is not None:
        yield topologies_chart(found.topologies)
    if found.ranks is not None:
        yield mesh_chart(job)
    if found.campaign is not None:
        yield campaign_chart(found.campaign)


@paged
def plan_plots(answer: PlanAnswer, *, top: int) -> Iterator[Piece | str]:
    found = answer.plan
    yield Line(f"{answer.explanation.sentence()}\n", "bold")
    yield Drawing(ranking_chart(found, top))
    yield Drawing(memory_of_layouts_chart(found, top))
    yield Drawing(pareto_chart(found, found.front))
    if answer.campaign is not None:
        yield Drawing(campaign_chart(answer.campaign))


@paged
def comparison_plots(found: Comparison) -> Iterator[Piece | str]:
    for one in (comparison_chart(found), memory_comparison_chart(found)):
        if one is not None:
            yield Drawing(one)
