"""How many microbatches' activations a pipeline rank holds at its peak, as the schedule's own actions have it."""

from __future__ import annotations

from shardwise.pipeline import peak_chunks_in_flight
from shardwise.spec.job import Job

SOURCES = {
    "gpipe": "Huang et al. 2019 (arXiv 1811.06965): all m microbatches",
    "1f1b": "Narayanan et al. 2021 (arXiv 2104.04473) section 2.2: p − rank",
    "interleaved": "Megatron-LM schedules: 2(p−rank−1) + (v−1)p + 1 chunks; rank 0: L(1 + (p−1)/(pv)) layers",
    "zb-h1": "Qi et al. 2023 (arXiv 2401.10241): the memory of 1F1B, p on every rank at most",
    "zb-h2": "Qi et al. 2023: 2p − 1",
    "zb-1p": "Qi et al. 2023: limited to p",
    "zb-2p": "Qi et al. 2023: limited to 2p",
    "zbv": "Qi et al. 2023: 2p chunks of half a stage",
    "v-half": "Qi et al. 2024 (arXiv 2405.15362): half of 1F1B, rounded up to a chunk",
    "v-min": "Qi et al. 2024: a third of 1F1B, rounded up to a chunk",
    "dualpipe": "DeepSeek DualPipe README: p + 1",
    "dualpipev": "DeepSeek DualPipe README: PP + 1 chunks of the PP = 2p half stages",
}


def chunks_in_flight(job: Job, rank: int) -> int:
    """Chunks (of ``chunks_per_rank`` on this rank) whose activations are alive at the peak.

    Divide by ``chunks_per_rank`` for microbatches of the whole rank.
    """
    strategy, m = job.strategy, job.microbatches
    if strategy.pp == 1:
        return strategy.chunks_per_rank * (m if strategy.schedule == "gpipe" else 1)
    return peak_chunks_in_flight(strategy.schedule, strategy.pp, m, strategy.chunks_per_rank, rank)
