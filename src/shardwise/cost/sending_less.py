"""Whether sending less between data-parallel ranks would pay: a hint, since it changes what is computed."""

from __future__ import annotations

from shardwise.cost.memory.room import fit_of
from shardwise.cost.prediction import predict
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise
from shardwise.spec.support import verdict

WORTH_A_WORD = 0.30  # of the step spent waiting for other data-parallel ranks
_TRIED = (
    ("strategy.compression=int8", Compression(method="int8"), Synchronise()),
    ("strategy.synchronise=diloco", Compression(), Synchronise(method="diloco")),
)


def sending_less(job: Job) -> str | None:
    """What compressed gradients and DiLoCo would make of a step that mostly waits for gradients; None of others."""
    strategy, step = job.strategy, predict(job)
    waiting = max(rank.exposed("dp") for rank in step.ranks) / step.step_seconds
    if waiting < WORTH_A_WORD or strategy.compression.is_used or not strategy.synchronise.every_step:
        return None
    found = []
    for words, compression, synchronise in _TRIED:
        try:
            other = job.with_strategy(
                zero=0, shard_group=None, keep_parameters=False, compression=compression, synchronise=synchronise
            )
        except SpecError:
            continue
        fits = fit_of(other) == "fits"
        faster = step.step_seconds / predict(other).step_seconds
        if fits and verdict(other).status == "runs" and faster > 1.1:
            found.append(f"{'zero=0 and ' if strategy.zero else ''}{words}: {faster:.1f} times faster")
    if not found:
        return None
    options = ", ".join(found)
    return f"{waiting:.0%} of the step waits for data-parallel ranks; options that also change the training: {options}"
