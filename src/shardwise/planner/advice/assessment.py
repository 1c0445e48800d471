"""One analysis and its assessment: error bar, bottleneck, what to change, storage, scaling, the whole run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from shardwise.cost.analysis import Analysis
from shardwise.cost.campaign import Campaign, StorageCost, checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import Bottleneck, Change, best_change, bottleneck, fitting_change, neighbours
from shardwise.cost.traffic.data import GradientTime, gradient_times
from shardwise.layout.views import is_unlike
from shardwise.planner.automatic import KINDS, smallest_offload
from shardwise.planner.candidate import change_words, strategy_words
from shardwise.spec.errors import SpecError, in_flags
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes
from shardwise.uncertainty.residuals import ErrorBar, error_bar

if TYPE_CHECKING:
    from shardwise.cost.memory.timeline import MemoryOverTime
    from shardwise.cost.step.scaling import PricedTopology, ScalingRow
    from shardwise.layout.mesh import RankPlace
    from shardwise.planner.advice.file_changes import FileAdvice
    from shardwise.planner.plan import Plan


# -- What makes a job fit: a single change, another strategy, offload, or other devices, each priced

SEARCH_SECONDS = 5.0  # for advice nobody asked for; `plan` searches longer


def what_would_fit(job: Job) -> str:
    """The nearest strategy that fits with a plan's margin; if none does, what the smallest would need."""
    # Only a job that does not fit is searched for: pricing does not import the search.
    from shardwise.planner.plan import Plan, plan, what_is_missing
    from shardwise.planner.request import Request

    change = fitting_change(job)
    if change is not None:
        return f"{change_words(job.strategy, change.job.strategy)}: that needs {readable_bytes(change.memory.total)}"
    if is_unlike(job):
        return "give the fullest devices fewer layers (stage_layers), or `shardwise plan`"
    fitting = _by_several_changes(job)
    if fitting is not None:
        return f"for example {strategy_words(fitting.strategy)} ({readable_bytes(peak_memory(fitting).total)})"
    batch = replace(job.training, global_batch=job.sequences)
    # On a CPU host memory is what runs out, so offload to it gains nothing.
    request = Request(
        job.unchecked(training=batch),
        offload=False if job.run_device == "cpu" else None,
        any_priced=verdict(job).status != "runs",
        time_limit_seconds=SEARCH_SECONDS,
    ).started()
    result = plan(replace(request, offload=False))
    if isinstance(result, Plan):
        return _nearest(job, result)
    offloaded = _with_offload(job)
    if offloaded is not None:
        return offloaded
    if request.offload is None:
        result = plan(replace(request, offload=True))
    if isinstance(result, Plan):
        return _nearest(job, result)
    if result.was_stopped:
        return f"nothing was found in {SEARCH_SECONDS:g} s; `shardwise plan` searches longer"
    return "; ".join(what_is_missing(result, request))


def nearest_fit(job: Job) -> Job | None:
    """The job with one change, or else several, after which it fits; quick, since nothing is searched."""
    change = fitting_change(job)
    if change is not None:
        return change.job
    return None if is_unlike(job) else _by_several_changes(job)


def _by_several_changes(job: Job) -> Job | None:
    """Repeats the change that saves most memory until the job fits, without offload; much faster than a search."""
    status, least_bytes = verdict(job).status, peak_memory(job).total
    while fit_of(job) != "fits":
        alike = [other for other in neighbours(job) if other.strategy.offload == job.strategy.offload]
        priced = [(peak_memory(other).total, other) for other in alike if verdict(other).status == status]
        saved_bytes, job = min(priced, key=lambda pair: pair[0], default=(least_bytes, job))
        if saved_bytes >= least_bytes:
            return None
        least_bytes = saved_bytes
    try:
        predict(job)
    except SpecError:  # a group cannot be placed on the network
        return None
    return job


def _nearest(job: Job, plan: Plan) -> str:
    """Words for the strategy of the plan that differs from the job's in the fewest fields; the fastest of several."""

    def changes(strategy: Strategy) -> int:
        return sum(getattr(strategy, field.name) != getattr(job.strategy, field.name) for field in fields(Strategy))

    best = min(plan.candidates, key=lambda candidate: (changes(candidate.job.strategy), candidate.step_seconds))
    return f"nearest that fits: {strategy_words(best.job.strategy)} ({readable_bytes(best.memory.total)})"


def _with_offload(job: Job) -> str | None:
    """Words for the least offload that makes the job fit: to the host, or on a CPU, whose own memory is full, to
    disk."""
    target: Literal["cpu", "nvme"] = "nvme" if job.run_device == "cpu" else "cpu"
    try:
        wanted = job.with_strategy(offload=replace(job.strategy.offload, target=target))
        fitting = smallest_offload(wanted)
    except SpecError:
        return None
    if verdict(fitting).status != verdict(job).status:
        return None
    offload = fitting.strategy.offload
    shares = ", ".join(f"{kind}: {getattr(offload, kind):g}" for kind in KINDS if getattr(offload, kind))
    needed = readable_bytes(peak_memory(fitting).total)
    return f"the least that fits: strategy.offload: {{{shares}, target: {offload.target}}} ({needed})"


# -- the assessment -------------------------------------------------------------------------------

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
    best_change: Change | None  # for a job that fits
    what_would_fit: str | None  # for a job that does not fit
    gradient_times: tuple[GradientTime, ...]
    storage: StorageUse
    campaign: Campaign | None = None
    scaling: dict[str, list[ScalingRow]] | None = None
    ranks: list[RankPlace] | None = None
    memory_over_time: MemoryOverTime | None = None
    topologies: tuple[PricedTopology, ...] | None = None
    advice: FileAdvice | None = None  # in the settings of the file that the job was read from

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
    places: list[RankPlace] | None = None
    if ranks:
        from shardwise.layout.mesh import rank_places

        places = rank_places(job)
    scaled: dict[str, list[ScalingRow]] | None = None
    compared: tuple[PricedTopology, ...] | None = None
    if scaling or topologies:
        from shardwise.cost.step.scaling import compared_topologies, scaling_table

        scaled = {kind: scaling_table(job, kind) for kind in SCALING_KINDS} if scaling else None
        compared = compared_topologies(job) if topologies else None
    return Assessment(
        analysis,
        error_bar(job),
        bottleneck(analysis),
        best_change(analysis) if advice and analysis.fits else None,
        in_flags(what_would_fit(job)) if advice and not analysis.fits else None,
        tuple(gradient_times(analysis)),
        StorageUse(checkpoint_bytes(analysis), data_rate(analysis), tuple(storage_costs(analysis))),
        campaign,
        scaled,
        places,
        memory,
        compared,
    )
