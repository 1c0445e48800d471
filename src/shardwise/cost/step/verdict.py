"""What bounds a job, and which single change of its strategy shortens the predicted step most, or makes it fit.

Less communication between data-parallel ranks is only a hint, since it changes the training itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.memory.device import DeviceMemory, peak_memory
from shardwise.cost.memory.room import fit_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import COMMUNICATION, grouped
from shardwise.cost.traffic.traffic import Traffic
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.support import Verdict, verdict

EXPOSED_LIMIT = 0.30
WORTH_A_CHANGE = 0.01  # of the predicted step
_GROUPS = {
    "arithmetic": ("products", "attention", "recompute"),
    "memory-bound": ("memory-bound",),
    "fixed": ("launches", "overhead", "stragglers"),
    "optimizer": ("optimizer",),
    "bubble": ("bubble",),
    **{name: (name,) for name in COMMUNICATION},
}


@dataclass(frozen=True)
class StepCause:
    """A part of the predicted step that bounds it."""

    part: str
    seconds: float
    share: float  # of the step
    collective: Traffic | None = None  # of communication: the collective that adds most
    level_name: str | None = None  # the network level on which that takes longest


@dataclass(frozen=True)
class Bottleneck:
    """What bounds a job: the memory of a device or of its host, else time."""

    kind: Literal["device memory", "host memory", "time"]
    causes: tuple[StepCause, ...] = ()  # the largest parts of the step, if time bounds it
    largest_part: str = ""  # that of a device's memory, if it has too little


def bottleneck(analysis: Analysis) -> Bottleneck:
    """Memory if the job does not fit; else the largest part of the predicted step, and the second if it matters."""
    memory = analysis.memory
    if analysis.fit == "does not fit":
        if memory.total <= analysis.room.refused_bytes:
            return Bottleneck("host memory")
        return Bottleneck("device memory", largest_part=max(memory.PARTS, key=lambda part: getattr(memory, part)))
    parts, whole = grouped(analysis.parts, _GROUPS), analysis.predicted_seconds
    first, second = sorted(parts, key=lambda part: -parts[part])[:2]
    named = (first,) if parts[second] < WORTH_A_CHANGE * whole else (first, second)
    return Bottleneck("time", tuple(_cause(analysis, part, parts[part]) for part in named))


def _cause(analysis: Analysis, part: str, seconds: float) -> StepCause:
    cause = StepCause(part, seconds, seconds / analysis.predicted_seconds)
    if part not in COMMUNICATION:
        return cause
    worst = max(analysis.dimension_traffics(part), key=lambda traffic: traffic.added_seconds, default=None)
    if worst is None:
        return cause
    level = max(worst.cost.levels, key=lambda level: level.latency_seconds + level.bandwidth_seconds, default=None)
    return replace(cause, collective=worst, level_name=None if level is None else level.level_name)


@dataclass(frozen=True)
class Change:
    """One change of the strategy, priced: the job with it takes ``predicted_seconds`` a step and fits."""

    job: Job
    predicted_seconds: float
    exposed_share: float
    memory: DeviceMemory

    @property
    def seconds_per_token(self) -> float:
        return self.predicted_seconds / self.job.tokens_per_step


def best_change(analysis: Analysis) -> Change | None:
    """The single change that shortens the predicted step most, if by enough, and that fits as well as the job."""
    allowed = ("fits",) if analysis.fit == "fits" else ("fits", "tight")
    change = fitting_change(analysis.job, allowed)
    limit = (1 - WORTH_A_CHANGE) * analysis.predicted_seconds / analysis.job.tokens_per_step
    return change if change is not None and change.seconds_per_token < limit else None


def fitting_change(job: Job, allowed: tuple[str, ...] = ("fits",)) -> Change | None:
    """The fastest single change with which a job fits, with the usual margin unless ``allowed`` says otherwise.

    It adds nothing to the job that the engine does not support.
    """
    now, timed = verdict(job), []
    for neighbour in neighbours(job):
        with suppress(SpecError):  # a group would cut across the network
            if _as_runnable(job, now, verdict(neighbour)):
                timed.append((predict(neighbour).step_seconds / neighbour.tokens_per_step, neighbour))
    timed.sort(key=lambda candidate: candidate[0])
    for _, neighbour in timed:  # the memory of slower ones does not matter
        if fit_of(neighbour) in allowed:
            priced = analyze(neighbour)
            return Change(neighbour, priced.predicted_seconds, priced.exposed_share, peak_memory(neighbour))
    return None


def _as_runnable(job: Job, now: Verdict, then: Verdict) -> bool:
    """Whether our engine runs a neighbour as it runs ``job``; on our own stack, with nothing further unsupported."""
    lacked = {finding.techniques for finding in now.findings}
    return now.status == then.status and not (
        job.stack.is_own and any(finding.techniques not in lacked for finding in then.findings)
    )


def neighbours(job: Job) -> Iterator[Job]:
    """Strategies one change away on the same devices with the same batch; those that cannot be built are skipped."""
    for changes in _changes(job):
        try:
            yield replace(job, strategy=_as_usual(job, replace(job.strategy, **changes), changes))
        except SpecError:
            continue


def _as_usual(job: Job, changed: Strategy, changes: dict[str, Any]) -> Strategy:
    """The changed strategy accumulates gradients as is usual for it, if the job does and ``changes`` do not say."""
    if "accumulate" in changes or job.strategy.accumulate != job.usual_accumulation(job.strategy):
        return changed
    return replace(changed, accumulate=job.usual_accumulation(changed))


def _changes(job: Job) -> Iterator[dict[str, Any]]:
    strategy = job.strategy
    dp = strategy.data_parallel
    for name in ("tp", "cp", "pp"):
        degree = strategy.degree(name)
        if degree % 2 == 0:
            yield {name: degree // 2, "dp": dp * 2}
        if dp % 2 == 0:
            yield {name: degree * 2, "dp": dp // 2}
    yield {"microbatch": strategy.microbatch * 2}
    if strategy.microbatch % 2 == 0:
        yield {"microbatch": strategy.microbatch // 2}
    for recompute in ("none", "selective", "full"):
        if recompute != strategy.recompute:
            yield {"recompute": recompute, "recompute_layers": None}
    for name in ("tp", "dp", "cp", "ep", "pp", "offload"):
        if not getattr(strategy.overlap, name):
            yield {"overlap": replace(strategy.overlap, **{name: True})}
    yield from _sharding_changes(job)
    if strategy.ep > 1:
        yield {"ep": strategy.ep // 2}
        if strategy.dispatch == "all-to-all":
            yield {"dispatch": "deduplicated"}
    # The memory of a CPU is the host's own.
    if strategy.offload == Offload() and job.cluster.host_link is not None and job.run_device != "cpu":
        yield {"offload": Offload(optimizer=1.0)}


def _sharding_changes(job: Job) -> Iterator[dict[str, Any]]:
    strategy = job.strategy
    for zero in range(4):
        if zero != strategy.zero:
            yield {"zero": zero}
    if strategy.zero == 3:
        yield {"keep_parameters": True}
    if strategy.zero >= 2:
        yield {"accumulate": "sharded" if strategy.accumulate == "local" else "local"}
        node = job.cluster.node_devices // strategy.tp
        if node > 1 and strategy.shard_group is None:
            yield {"shard_group": node}


WORTH_A_WORD = 0.30  # of the step spent waiting for other data-parallel ranks
WORTH_A_CHANGE_OF_TRAINING = 1.1  # times as fast
_TRIED = ((Compression(method="int8"), Synchronise()), (Compression(), Synchronise(method="diloco")))


@dataclass(frozen=True)
class SendingLess:
    """What a job would gain from less communication between data-parallel ranks."""

    waiting_share: float  # the share of the step that waits for them
    speedups: Mapping[Job, float]  # of jobs that communicate less


def sending_less(job: Job) -> SendingLess | None:
    """What compressed gradients and DiLoCo would gain; None unless the step waits long for gradients."""
    strategy, step = job.strategy, predict(job)
    waiting = max(rank.exposed("dp") for rank in step.ranks) / step.step_seconds
    if waiting < WORTH_A_WORD or strategy.compression.is_used or not strategy.synchronise.every_step:
        return None
    speedups = {}
    for compression, synchronise in _TRIED:
        try:
            candidate = job.with_strategy(
                zero=0, shard_group=None, keep_parameters=False, compression=compression, synchronise=synchronise
            )
        except SpecError:
            continue
        fits = fit_of(candidate) == "fits"
        speedup = step.step_seconds / predict(candidate).step_seconds
        if fits and verdict(candidate).status == "runs" and speedup > WORTH_A_CHANGE_OF_TRAINING:
            speedups[candidate] = speedup
    return SendingLess(waiting, speedups) if speedups else None
