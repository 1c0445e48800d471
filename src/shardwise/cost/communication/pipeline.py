"""Pipeline parallelism: one message each way per stage boundary and microbatch.

A boundary carries b·s·h elements, divided by tp under sequence parallelism; interleaving sends one message per
chunk (Narayanan et al. 2021, section 4.1).
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.network import group_runs, spanned
from shardwise.cost.stages import RankContents
from shardwise.cost.traffic import Traffic, priced
from shardwise.spec.job import Job


def pipeline_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Point-to-point messages between neighbouring stages, over the slowest boundary's level."""
    strategy = job.strategy
    topology = spanned(job.cluster, group_runs(strategy, ("pp",)), "strategy.pp")
    if topology is None:
        return []
    # Stages move in step, so the boundary on the outermost level sets the pace.
    boundary = Topology(levels=topology.levels[-1:])
    region = job.microbatch_tokens / (strategy.tp if strategy.sequence_parallel else 1)
    size = region * job.model.hidden * job.training.recipe.communication
    messages = job.microbatches * strategy.chunks_per_rank
    traffics = [
        priced("pp", what, CollectiveKind.SEND_RECV, size, messages, boundary, strategy.collective)
        for what in ("activations, forward", "gradients, backward")
    ]
    exposed = exposed_messages(job) * float(traffics[0].cost.seconds) / 2
    return [replace(traffic, fixed_exposed_seconds=exposed) for traffic in traffics]


def exposed_messages(job: Job) -> float:
    """Messages on the critical path of one step.

    Overlapped, only the fill and the drain wait: 2(p−1)·v. Otherwise 1F1B's limit of p microbatches in
    flight makes every microbatch pay 2(p−1)/p of one, plus 2(p−2) at the ends (derived from the event
    simulation of the schedule; exact when p divides m); interleaving pays 2(p−1)·v more per fill.
    """
    p, m, v = job.strategy.pp, job.microbatches, job.strategy.chunks_per_rank
    if job.strategy.overlap.pp:
        return 2.0 * (p - 1) * v
    if job.strategy.schedule == "interleaved":
        return 2.0 * (p - 1) * v + 2.0 * m * v * (p - 1) / p
    return 2.0 * (p - 1) * m / p + 2.0 * max(0, p - 2)


def bubble_share(schedule: str, stages: int, microbatches: int, chunks: int) -> float:
    """Idle time of a pipeline as a share of its busy time, for equal stages, F = B = W, no communication.

    Narayanan et al. 2021 (GPipe, 1F1B, interleaved), Qi et al. 2023 (zero bubble), DeepSeek DualPipe README.
    A simulator of the very action lists replaces this where stages or passes are unequal.
    """
    p, m = stages, microbatches
    if p == 1:
        return 0.0
    plain = (p - 1) / m
    return {
        "gpipe": plain,
        "1f1b": plain,
        "interleaved": plain / chunks,
        "zb-h1": plain / 3,
        "zb-1p": plain / 3,
        "zb-h2": 0.0,
        "zb-2p": 0.0,
        "zbv": 0.0,
        "v-half": plain / 2,
        "v-min": plain * 2 / 3,
        # (p/2 − 1)(F&B + B − 3W) with F&B = F + B_full overlapped = 3 units, B_full = 2, W = 1.
        "dualpipe": max(0.0, (p / 2 - 1) * 2 / (3 * m)),
        "dualpipev": max(0.0, (p / 2 - 1) * 2 / (3 * m)),
    }[schedule]
