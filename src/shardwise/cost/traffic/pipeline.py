"""Pipeline parallelism: one message each way per stage boundary and microbatch.

A boundary carries b·s·h elements, divided by tp under sequence parallelism; interleaving sends one message per
chunk (Narayanan et al. 2021, section 4.1).
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology
from shardwise.collectives.work import COST_FIGURES
from shardwise.cost.traffic.traffic import Traffic, collective_price, priced
from shardwise.layout.groups import group_runs
from shardwise.layout.network import Neighbours, spanned
from shardwise.layout.payloads import Payload, Role, sent_backward, sent_forward
from shardwise.layout.sharding import divided_over
from shardwise.layout.stages import RankContents, embedding_on_both_ends
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.pipeline import chunks_per_rank
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record

_SHORT = 2.0**-20  # of a pass: exact in the sums of a schedule


def pipeline_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Point-to-point messages between neighbouring stages, over the slowest boundary's level."""
    payloads = (sent_forward(Role.ACTIVATIONS), sent_backward(Role.GRADIENTS))
    messages = [message_traffic(job, payload) for payload in payloads]
    exposed = exposed_messages(job) / 2
    scheduled = [
        message.but(fixed_exposed_seconds=exposed * float(message.cost.seconds)) for message in messages if message
    ]
    return scheduled + tied_traffic(job, contents, tied_bytes(job, divided_over(job.strategy)))


def boundary(job: Job) -> Topology | None:
    """The network of the slowest stage boundary: stages move in step, so the outermost level sets the pace."""
    neighbours: Neighbours = "line" if job.strategy.chunks_per_rank == 1 else "ring"
    topology = spanned(job.cluster, group_runs(job.strategy, ("pp",)), "strategy.pp", neighbours)
    return None if topology is None else Topology(levels=topology.levels[-1:])


def message_traffic(job: Job, payload: Payload) -> Traffic | None:
    """All messages of one direction; None without a pipeline."""
    strategy, over = job.strategy, boundary(job)
    if over is None:
        return None
    size = job.computed_tokens * job.model.hidden * job.training.recipe.communication
    scattered = job.stack.scattered_messages and not strategy.sequence_parallel
    sent = size / strategy.tp if strategy.sequence_parallel or scattered else size
    messages = job.microbatches * strategy.chunks_per_rank
    message = priced("pp", payload, CollectiveKind.SEND_RECV, sent, messages, over, strategy.collective)
    within = spanned(job.cluster, group_runs(strategy, ("tp",)), "strategy.tp")
    if not scattered or within is None:
        return message
    # Ranks that hold the same activations send a part each, which the receivers gather (Narayanan et al. 2021, 4.1).
    gather = collective_price(CollectiveKind.ALL_GATHER, size, within, strategy.collective)
    return replace(message, cost=_followed_by(message.cost, gather))


def _followed_by(first: CollectiveCost, second: CollectiveCost) -> CollectiveCost:
    summed = {name: getattr(first, name) + getattr(second, name) for name in (*COST_FIGURES, "levels")}
    return replace(first, algorithm=f"{first.algorithm}, then all-gather, {second.algorithm}", **summed)


def tied_bytes(job: Job, shards: float) -> float:
    """Bytes that each end sends: a whole gradient; with FSDP its fp32 shard, already reduced over data parallelism."""
    parameters = job.model.vocab * job.model.hidden / job.strategy.tp
    if shards > 1 and job.recipe.fp32_shards:
        return 4 * parameters / shards
    return parameters * job.training.recipe.gradient


def tied_traffic(job: Job, contents: RankContents, size: float) -> list[Traffic]:
    """Gradients of the token embedding, ``size`` bytes, summed over both ends of the pipeline where both hold it.

    Shoeybi et al. 2019, section 3.
    """
    over = boundary(job)
    apart = contents.has_embedding != contents.has_head and not job.strategy.schedule_record.two_copies
    if over is None or not (apart and embedding_on_both_ends(job)):
        return []
    # An all-reduce of two ranks is one exchange of the whole buffer.
    payload = sent_backward(Role.TIED_GRADIENTS)
    return [priced("pp", payload, CollectiveKind.SEND_RECV, size, 1, over, job.strategy.collective, once=True)]


def exposed_messages(job: Job) -> float:
    """Messages on the critical path of one step: the growth of the schedule's idle time per message time.

    For short messages. With overlap, only the fill and the drain wait: 2(p−1)·v.
    """
    strategy, m, v = job.strategy, job.microbatches, job.strategy.chunks_per_rank
    silent = idle_seconds(strategy.schedule, strategy.pp, m, v)
    waiting = float(idle_seconds(strategy.schedule, strategy.pp, m, v, comm_seconds=_SHORT) - silent) / _SHORT
    return min(waiting, 2.0 * (strategy.pp - 1) * v) if strategy.overlap.pp else waiting


def bubble_share(schedule: str, stages: int, microbatches: int, chunks: int) -> float:
    """Idle time of a pipeline as a share of its busy time, for equal stages, F = I = W and no communication."""
    chunks = chunks_per_rank(schedule, chunks if schedule_record(schedule).chooses_chunks else None)
    return float(idle_seconds(schedule, stages, microbatches, chunks)) / (3 * chunks * microbatches)
