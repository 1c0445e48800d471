"""How many microbatches' activations a pipeline rank holds at its peak, as the schedule's own actions have it."""

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
    return peak_chunks(strategy.schedule, strategy.pp, job.microbatches, strategy.chunks_per_rank, rank)


def peak_chunks(schedule: str, pp: int, microbatches: int, chunks: int, rank: int) -> int:
    """The same of a schedule. Without a pipeline there is one microbatch at a time, unless forwards come first."""
    if pp == 1:
        return chunks * (microbatches if schedule_record(schedule).forwards_first else 1)
    return peak_chunks_in_flight(schedule, pp, microbatches, chunks, rank)


@lru_cache(maxsize=65536)
def peak_chunks_of_kinds(
    schedule: str, pp: int, microbatches: int, chunks: int, kinds: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """The same of the fullest rank of each kind, given the ranks of each."""
    return tuple(max(peak_chunks(schedule, pp, microbatches, chunks, rank) for rank in ranks) for ranks in kinds)
