"""`analyze`: one job, priced, with what bounds it and what to change; `predict`: its step time and memory alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Unpack

from shardwise.api.campaign import CampaignArguments, campaign_of
from shardwise.api.given import JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import decided_job
from shardwise.api.results import Figure, Result, Rows
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.cost.memory.device import DeviceMemory
from shardwise.cost.memory.room import Fit
from shardwise.cost.step.verdict import Change
from shardwise.layout.views import is_unlike
from shardwise.planner.advice.assessment import Assessment, assess
from shardwise.report.analysis import analysis_data, analysis_page, analysis_screen, dimension_data, topology_rows
from shardwise.report.page import Page
from shardwise.report.verdict import bottleneck_sentence, prediction_table
from shardwise.spec.bare import Size
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

_MOST_RANKS = 100_000
_MOST_PASSES = 1_000_000  # a few seconds, and a few hundred megabytes of trace
_PREDICTED = ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high", "floor_seconds",
              "tokens_per_second", "mfu", "memory_bytes", "usable_bytes", "fits")  # fmt: skip


@dataclass(frozen=True)
class PredictionResult(Result):
    """The predicted step time and memory of one job."""

    verb = "predict"
    assessment: Assessment
    """Every figure."""
    notes: tuple[str, ...] = ()
    """What was assumed where the job left it open."""

    job = Figure[Job]("assessment.analysis.job")
    predicted_seconds = Figure[float]("assessment.analysis.predicted_seconds", "A step, as it should take in a run.")
    # 80% of published runs are inside the error bar.
    predicted_seconds_low = Figure[float]("assessment.predicted_seconds_low", "The lower end of the error bar.")
    predicted_seconds_high = Figure[float]("assessment.predicted_seconds_high", "The upper end of the error bar.")
    # All matmuls at peak, communication as priced, nothing else.
    floor_seconds = Figure[float]("assessment.analysis.floor_seconds", "What no software can beat.")
    tokens_per_second = Figure[float]("assessment.analysis.tokens_per_second")
    mfu = Figure[float]("assessment.analysis.mfu")
    exposed_share = Figure[float]("assessment.analysis.exposed_share", "Of the step: what waits for communication.")
    fits = Figure[bool]("assessment.analysis.fits")
    fit = Figure[Fit]("assessment.analysis.fit", "Tight: it fits without the margin that plans keep.")
    memory = Figure[DeviceMemory]("assessment.analysis.memory", "The fullest device, part by part.")
    memory_bytes = Figure[float]("assessment.analysis.memory.total", "What the fullest device holds.")
    usable_bytes = Figure[float]("assessment.analysis.room.usable_bytes", "What a process can use of a device.")

    @property
    def parts_seconds(self) -> dict[str, float]:
        """The parts of the predicted step, which add up to ``predicted_seconds``."""
        return dict(self.assessment.analysis.parts)

    @property
    def free_bytes(self) -> float:
        """What the job leaves of a device; negative if it does not fit."""
        return self.usable_bytes - self.memory_bytes

    @cached_property
    def page(self) -> Page:
        return Page((prediction_table(self.assessment),))

    def _data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PREDICTED}

    def tables(self) -> Mapping[str, Rows]:
        return {"prediction": [self._data()]}


class AnalysisResult(PredictionResult):
    """One job, priced, with what bounds it and what to change."""

    verb = "analyze"

    best_change = Figure[Change | None]("assessment.best_change", "What shortens the step most, if it is worth it.")

    @property
    def bottleneck(self) -> str:
        """What bounds the job, in a sentence."""
        return bottleneck_sentence(self.assessment.analysis, self.assessment.bottleneck)

    @cached_property
    def page(self) -> Page:
        return analysis_page(self.assessment)

    @property
    def screen(self) -> Page:
        return analysis_screen(self.assessment)

    @cached_property
    def plots(self) -> Page:
        """The same in pictures."""
        from shardwise.report.charts.sections import analysis_plots

        return analysis_plots(self.assessment)

    def _data(self) -> dict[str, Any]:
        return analysis_data(self.assessment)

    def tables(self) -> Mapping[str, Rows]:
        analysis = self.assessment.analysis
        collectives = [
            {"dimension": name, **row}
            for name in analysis.exposed_by_dimension()
            for row in dimension_data(analysis, name)["collectives"]
        ]
        held = analysis.memory
        scaled = self.assessment.scaling or {}
        return {
            "parts": [
                {"part": name, "seconds": seconds, "share": seconds / self.predicted_seconds}
                for name, seconds in self.parts_seconds.items()
            ],
            "memory": [{"part": part, "bytes": getattr(held, part)} for part in held.PARTS],
            "collectives": collectives,
            **({"topologies": topology_rows(self.assessment.topologies)} if self.assessment.topologies else {}),
            **(
                {"advice": [change.to_dict() for change in advice.changes]}
                if (advice := self.assessment.advice)
                else {}
            ),
            **{f"{kind}_scaling": [asdict(row) for row in rows] for kind, rows in scaled.items()},
        }


def analyze(
    job: JobSource | None = None,
    *,
    scaling: bool = False,
    ranks: bool = False,
    memory_over_time: bool = False,
    compare_topologies: bool = False,
    advise: bool = False,
    tokens: Size | None = None,
    price: Size | None = None,
    mtbf: Size | None = None,
    checkpoint_seconds: Size | None = None,
    restart_seconds: Size | None = None,
    **keywords: Unpack[JobKeywords],
) -> AnalysisResult:
    """Prices one job: a Job, a job file, or keywords such as ``model="llama3-8b", cluster="dgx-h100:2", tp=8``.

    ``scaling`` adds strong and weak scaling, ``ranks`` the groups of every rank, ``memory_over_time`` the memory of
    each pipeline rank over a step, ``compare_topologies`` the same job on a ring, a tree, a hierarchy, a switch, a mesh
    and a torus. ``advise`` adds what to change in another framework's file, in its own settings. ``tokens`` prices the
    whole run, with ``price`` (per device-hour) and ``mtbf`` (device-hours).
    """
    made, notes = _job(job, keywords)
    if ranks and made.cluster.devices > _MOST_RANKS:
        raise SpecError("⟨ranks⟩", f"{made.cluster.devices:,} rows are more than {_MOST_RANKS:,}", "leave it out")
    if scaling and is_unlike(made):
        raise SpecError("⟨scaling⟩", "is for equal devices and stages", "leave it out")
    if compare_topologies and (is_unlike(made) or made.cluster.devices == 1):
        problem = "is for two or more devices of one kind, and equal stages"
        raise SpecError("⟨compare_topologies⟩", problem, "leave it out")
    analysis = analyze_job(made)
    run = CampaignArguments(tokens, price, mtbf, checkpoint_seconds, restart_seconds)
    campaign = campaign_of(run, made, analysis.predicted_seconds)
    asked = {"scaling": scaling, "ranks": ranks, "over_time": memory_over_time, "topologies": compare_topologies}
    assessment = assess(analysis, campaign=campaign, **asked)
    if advise:
        from shardwise.api.advice import file_advice

        assessment = replace(assessment, advice=file_advice(job_arguments(job, keywords), made))
    return AnalysisResult(assessment, (*notes, *analysis.notes))


def predict(job: JobSource | None = None, **keywords: Unpack[JobKeywords]) -> PredictionResult:
    """The predicted step time with its error bar, the floor, and the memory of one job, as `analyze` has them."""
    made, notes = _job(job, keywords)
    analysis = analyze_job(made)
    return PredictionResult(assess(analysis, advice=False), (*notes, *analysis.notes))


def require_few_passes(job: Job, field: str, most: int = _MOST_PASSES) -> None:
    """Raises SpecError for a step that is too long to draw pass by pass, before anything is computed."""
    passes = 3 * job.microbatches * job.strategy.stages
    if passes > most:
        problem = f"{job.microbatches:,} microbatches make {passes:,} passes, more than {most:,}"
        raise SpecError(field, problem, "give a smaller ⟨global_batch⟩")


def _job(job: JobSource | None, keywords: JobKeywords) -> tuple[Job, list[str]]:
    if isinstance(job, Job) and not keywords:
        return job, []
    return decided_job(job_arguments(job, keywords))
