"""One analysis and its assessment: error bar, bottleneck, what to change, storage, scaling, the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.cost.analysis import Analysis
from shardwise.cost.campaign import Campaign, StorageCost, checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.step.scaling import ScalingRow, scaling_table
from shardwise.cost.step.topologies import PricedTopology, compared_topologies
from shardwise.cost.step.verdict import Bottleneck, Change, best_change, bottleneck
from shardwise.cost.traffic.gradient_reduction import GradientTime, gradient_times
from shardwise.layout.mesh import RankPlace, rank_places
from shardwise.planner.advice.remedy import what_would_fit
from shardwise.spec.errors import in_flags
from shardwise.uncertainty.residuals import ErrorBar, error_bar

if TYPE_CHECKING:
    from shardwise.cost.memory.timeline import MemoryOverTime

SCALING_KINDS = ("strong", "weak")


@dataclass(frozen=True)
class StorageUse:
    """What the job writes and reads, and how long each level of the cluster's storage takes for it."""

    checkpoint_bytes: float
    data_bytes_per_second: float
    levels: tuple[StorageCost, ...]


@dataclass(frozen=True)
class Assessment:
    """An analysis with what follows from it; the fields with defaults are computed on request."""

    analysis: Analysis
    error_bar: ErrorBar
    bottleneck: Bottleneck
    best_change: Change | None
    """For a job that fits."""
    what_would_fit: str | None
    """For a job that does not fit."""
    gradient_times: tuple[GradientTime, ...]
    storage: StorageUse
    campaign: Campaign | None = None
    scaling: dict[str, list[ScalingRow]] | None = None
    ranks: list[RankPlace] | None = None
    memory_over_time: MemoryOverTime | None = None
    topologies: tuple[PricedTopology, ...] | None = None

    @property
    def predicted_seconds_low(self) -> float:
        return self.analysis.step.low_seconds(self.error_bar.time_low)

    @property
    def predicted_seconds_high(self) -> float:
        return self.analysis.predicted_seconds * (1 + self.error_bar.time_high)

    @property
    def change_gain(self) -> float:
        """The share of the time per token that the best change saves; 0 without one."""
        if self.best_change is None:
            return 0.0
        analysis = self.analysis
        return 1 - self.best_change.seconds_per_token * analysis.job.tokens_per_step / analysis.predicted_seconds


def assess(
    analysis: Analysis,
    *,
    campaign: Campaign | None = None,
    scaling: bool = False,
    ranks: bool = False,
    over_time: bool = False,
    topologies: bool = False,
    advice: bool = True,
) -> Assessment:
    """Assesses an analysis; ``advice`` searches for what to change, which takes most of the time."""
    job = analysis.job
    memory: MemoryOverTime | None = None
    if over_time:
        from shardwise.cost.memory.timeline import memory_over_time

        memory = memory_over_time(job)
    return Assessment(
        analysis,
        error_bar(job),
        bottleneck(analysis),
        best_change(analysis) if advice and analysis.fits else None,
        in_flags(what_would_fit(job)) if advice and not analysis.fits else None,
        tuple(gradient_times(analysis)),
        StorageUse(checkpoint_bytes(analysis), data_rate(analysis), tuple(storage_costs(analysis))),
        campaign,
        {kind: scaling_table(job, kind) for kind in SCALING_KINDS} if scaling else None,
        rank_places(job) if ranks else None,
        memory,
        compared_topologies(job) if topologies else None,
    )
