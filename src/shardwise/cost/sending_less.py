"""Whether sending less between data-parallel ranks would pay: a hint, since it changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.room import fit_of
from shardwise.cost.prediction import predict
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise
from shardwise.spec.support import verdict

WORTH_A_WORD = 0.30  # of the step spent waiting for other data-parallel ranks
WORTH_A_CHANGE_OF_TRAINING = 1.1  # times as fast
_TRIED = ((Compression(method="int8"), Synchronise()), (Compression(), Synchronise(method="diloco")))


@dataclass(frozen=True)
class FasterJob:
    """A job that sends less, and how many times as fast its step is."""

    job: Job
    speedup: float


@dataclass(frozen=True)
class SendingLess:
    """The share of the step that waits for data-parallel ranks, and what would shorten it."""

    waiting_share: float
    options: tuple[FasterJob, ...]


def sending_less(job: Job) -> SendingLess | None:
    """What compressed gradients and DiLoCo would make of a step that mostly waits for gradients; None of others."""
    strategy, step = job.strategy, predict(job)
    waiting = max(rank.exposed("dp") for rank in step.ranks) / step.step_seconds
    if waiting < WORTH_A_WORD or strategy.compression.is_used or not strategy.synchronise.every_step:
        return None
    found = []
    for compression, synchronise in _TRIED:
        try:
            other = job.with_strategy(
                zero=0, shard_group=None, keep_parameters=False, compression=compression, synchronise=synchronise
            )
        except SpecError:
            continue
        fits = fit_of(other) == "fits"
        speedup = step.step_seconds / predict(other).step_seconds
        if fits and verdict(other).status == "runs" and speedup > WORTH_A_CHANGE_OF_TRAINING:
            found.append(FasterJob(other, speedup))
    return SendingLess(waiting, tuple(found)) if found else None
