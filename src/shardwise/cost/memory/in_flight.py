"""How many microbatches' activations a pipeline rank holds at its peak, as the schedule's own actions have it."""

from __future__ import annotations

from shardwise.pipeline import peak_chunks_in_flight
from shardwise.spec.job import Job


def chunks_in_flight(job: Job, rank: int) -> int:
    """Chunks (of ``chunks_per_rank`` on this rank) whose activations are alive at the peak.

    Divide by ``chunks_per_rank`` for microbatches of the whole rank.
    """
    strategy, m = job.strategy, job.microbatches
    if strategy.pp == 1:
        return strategy.chunks_per_rank * (m if strategy.schedule_record.forwards_first else 1)
    return peak_chunks_in_flight(strategy.schedule, strategy.pp, m, strategy.chunks_per_rank, rank)
