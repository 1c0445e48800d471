"""`analyze`: one job, priced, with what bounds it and what to change; `predict`: its step time and memory alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Unpack

from shardwise.api.campaign import CampaignArguments, campaign_of
from shardwise.api.given import JobKeywords, JobSource, Size, job_arguments
from shardwise.api.inputs import job_from
from shardwise.api.results import Result, Rows
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.cost.memory.device import DeviceMemory
from shardwise.cost.memory.room import Fit
from shardwise.cost.step.verdict import Change
from shardwise.planner.advice.assessment import Assessment, assess
from shardwise.report.analysis_json import analysis_data, dimension_data
from shardwise.report.analysis_text import analysis_page
from shardwise.report.page import Page
from shardwise.report.verdict import bottleneck_sentence, prediction_table
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

_MOST_RANKS = 100_000
_PREDICTED = ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high", "floor_seconds",
              "tokens_per_second", "mfu", "memory_bytes", "usable_bytes", "fits")  # fmt: skip


@dataclass(frozen=True)
class PredictionResult(Result):
    """The predicted step time and memory of one job; ``notes`` say what was assumed where the job left it open."""

    assessment: Assessment
    notes: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        return self.assessment.analysis.job

    @property
    def predicted_seconds(self) -> float:
        """How long a step should take: the figure to compare with a run."""
        return self.assessment.analysis.predicted_seconds

    @property
    def predicted_seconds_low(self) -> float:
        """The lower end of the error bar: 80% of published runs are inside."""
        return self.assessment.predicted_seconds_low

    @property
    def predicted_seconds_high(self) -> float:
        return self.assessment.predicted_seconds_high

    @property
    def floor_seconds(self) -> float:
        """What no software can beat: all matmuls at peak, communication as priced, nothing else."""
        return self.assessment.analysis.floor_seconds

    @property
    def parts_seconds(self) -> dict[str, float]:
        """Where the predicted step goes; the parts add up to ``predicted_seconds``."""
        return dict(self.assessment.analysis.parts)

    @property
    def tokens_per_second(self) -> float:
        return self.assessment.analysis.tokens_per_second

    @property
    def mfu(self) -> float:
        return self.assessment.analysis.mfu

    @property
    def fits(self) -> bool:
        return self.assessment.analysis.fits

    @property
    def fit(self) -> Fit:
        """Whether it fits, fits without the margin that plans keep ("tight"), or does not fit."""
        return self.assessment.analysis.fit

    @property
    def memory(self) -> DeviceMemory:
        """The fullest device, part by part."""
        return self.assessment.analysis.memory

    @property
    def memory_bytes(self) -> float:
        """What the fullest device holds."""
        return self.memory.total

    @property
    def usable_bytes(self) -> float:
        """What a process can use of a device's memory."""
        return self.assessment.analysis.room.usable_bytes

    @property
    def free_bytes(self) -> float:
        """What the job leaves of that; negative if it does not fit."""
        return self.usable_bytes - self.memory_bytes

    @property
    def exposed_share(self) -> float:
        """The share of the predicted step that waits for communication."""
        return self.assessment.analysis.exposed_share

    @cached_property
    def page(self) -> Page:
        return Page((prediction_table(self.assessment),))

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PREDICTED}

    def tables(self) -> Mapping[str, Rows]:
        return {"prediction": [self.to_dict()]}


class AnalysisResult(PredictionResult):
    """One job, priced, with what bounds it and what to change; ``assessment`` has every figure."""

    @property
    def bottleneck(self) -> str:
        """What bounds the job, in a sentence."""
        return bottleneck_sentence(self.assessment.analysis, self.assessment.bottleneck)

    @property
    def best_change(self) -> Change | None:
        """The single change of the strategy that shortens the step most, if one is worth it."""
        return self.assessment.best_change

    @cached_property
    def page(self) -> Page:
        return analysis_page(self.assessment)

    def to_dict(self) -> dict[str, Any]:
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
            **{f"{kind}_scaling": [asdict(row) for row in rows] for kind, rows in scaled.items()},
        }


def analyze(
    job: JobSource | None = None,
    *,
    scaling: bool = False,
    ranks: bool = False,
    memory_over_time: bool = False,
    tokens: Size | None = None,
    price: Size | None = None,
    mtbf: Size | None = None,
    checkpoint_seconds: Size | None = None,
    restart_seconds: Size | None = None,
    **keywords: Unpack[JobKeywords],
) -> AnalysisResult:
    """Prices one job: a Job, a job file, or keywords such as ``model="llama3-8b", cluster="dgx-h100:2", tp=8``.

    ``scaling`` adds strong and weak scaling, ``ranks`` the groups of every rank, ``memory_over_time`` what a device
    holds when. ``tokens`` prices the whole run, with ``price`` (per device-hour) and ``mtbf`` (device-hours).
    """
    made, notes = _job(job, keywords)
    if ranks and made.cluster.devices > _MOST_RANKS:
        raise SpecError("--ranks", f"{made.cluster.devices:,} rows are more than {_MOST_RANKS:,}", "leave it out")
    analysis = analyze_job(made)
    run = CampaignArguments(tokens, price, mtbf, checkpoint_seconds, restart_seconds)
    campaign = campaign_of(run, made, analysis.predicted_seconds)
    found = assess(analysis, campaign=campaign, scaling=scaling, ranks=ranks, over_time=memory_over_time)
    return AnalysisResult(found, (*notes, *analysis.notes))


def predict(job: JobSource | None = None, **keywords: Unpack[JobKeywords]) -> PredictionResult:
    """The predicted step time with its error bar, the floor, and the memory of one job; the same as `analyze` says."""
    made, notes = _job(job, keywords)
    analysis = analyze_job(made)
    return PredictionResult(assess(analysis, advice=False), (*notes, *analysis.notes))


def _job(job: JobSource | None, keywords: JobKeywords) -> tuple[Job, list[str]]:
    if isinstance(job, Job) and not keywords:
        return job, []
    return job_from(job_arguments(job, keywords))
