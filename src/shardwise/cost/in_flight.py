"""How many microbatches' activations a pipeline rank holds at its peak, by schedule."""

from __future__ import annotations

from shardwise.spec.job import Job

SOURCES = {
    "gpipe": "Huang et al. 2019 (arXiv 1811.06965): all m microbatches",
    "1f1b": "Narayanan et al. 2021 (arXiv 2104.04473) section 2.2: p − rank",
    "interleaved": "Megatron-LM schedules: 2(p−rank−1) + (v−1)p + 1 chunks; rank 0: L(1 + (p−1)/(pv)) layers",
    "zb-h1": "Qi et al. 2023 (arXiv 2401.10241): the memory of 1F1B, p on every rank at most",
    "zb-h2": "Qi et al. 2023: 2p − 1",
    "zb-1p": "Qi et al. 2023: limited to p",
    "zb-2p": "Qi et al. 2023: limited to 2p (2p − 1 are reached)",
    "zbv": "Qi et al. 2023: 2p chunks of half a stage",
    "v-half": "Qi et al. 2024 (arXiv 2405.15362): half of 1F1B, rounded up to a chunk",
    "v-min": "Qi et al. 2024: a third of 1F1B, rounded up to a chunk",
    "dualpipe": "DeepSeek DualPipe README: p + 1",
    "dualpipev": "DeepSeek DualPipe README: p + 1, as half-stage chunks 2p + 2",
}


def chunks_in_flight(job: Job, rank: int) -> int:
    """Chunks (of ``chunks_per_rank`` on this rank) whose activations are alive at the peak.

    Divide by ``chunks_per_rank`` for microbatches of the whole rank.
    """
    p, schedule, m = job.strategy.pp, job.strategy.schedule, job.microbatches
    v = job.strategy.chunks_per_rank
    if p == 1:
        return v * (m if schedule == "gpipe" else 1)
    peak = {
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-1p": p,
        "zb-2p": 2 * p - 1,
        "zbv": 2 * p,
        "v-half": p + 2,
        "v-min": -(-2 * p // 3) + 2,
        "dualpipe": p + 1,
        "dualpipev": 2 * p + 2,
    }[schedule]
    return min(peak, m * v)
