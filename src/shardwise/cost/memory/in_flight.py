"""How many microbatches' activations a pipeline rank holds at its peak."""

from __future__ import annotations

from functools import lru_cache

from shardwise.pipeline import peak_chunks_in_flight
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record


def microbatches_in_flight(job: Job, rank: int) -> float:
    """Microbatches of the whole rank whose activations are alive at its peak."""
    return chunks_in_flight(job, rank) / job.strategy.chunks_per_rank


def chunks_in_flight(job: Job, rank: int) -> int:
    """Chunks (of ``chunks_per_rank`` on this rank) whose activations are alive at the peak."""
    strategy = job.strategy
    ahead = job.stack.forwards_ahead(strategy, strategy.schedule_record)
    return peak_chunks(strategy.schedule, strategy.pp, job.microbatches, strategy.chunks_per_rank, rank, ahead)


def peak_chunks(schedule: str, pp: int, microbatches: int, chunks: int, rank: int, ahead: int) -> int:
    """Chunks in flight under a schedule; without a pipeline those of one microbatch, unless all forwards come first."""
    if pp == 1:
        return chunks * (microbatches if schedule_record(schedule).forwards_first else 1)
    return peak_chunks_in_flight(schedule, pp, microbatches, chunks, rank, ahead)


@lru_cache(maxsize=65536)
def peak_chunks_of_kinds(
    schedule: str, pp: int, microbatches: int, chunks: int, kinds: tuple[tuple[int, ...], ...], ahead: int
) -> tuple[int, ...]:
    """`peak_chunks` of the fullest rank of each kind; ``kinds``: the ranks of each."""
    return tuple(max(peak_chunks(schedule, pp, microbatches, chunks, rank, ahead) for rank in ranks) for ranks in kinds)
