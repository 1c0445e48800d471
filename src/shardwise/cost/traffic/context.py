"""Context parallelism: ring attention, all-gather of keys and values, or Ulysses.

Ring attention passes keys and values around point to point under its own blocks (Liu et al. 2023, arXiv
2310.01889); Llama 3 gathers keys and values (arXiv 2407.21783, section 3.3.2); Ulysses exchanges sequence for
heads by all-to-all (Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.compute.operators import fully_recomputed_share
from shardwise.cost.traffic.network import exchanging, spanned
from shardwise.cost.traffic.overlap import Window
from shardwise.cost.traffic.traffic import Payload, Role, Traffic, priced, sent_backward, sent_forward
from shardwise.layout.groups import group_runs
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def context_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives of the context-parallel group in attention."""
    topology = spanned(job.cluster, group_runs(job.strategy, ("cp",)), "strategy.cp")
    if topology is None or not contents.layers:
        return []
    method = {"ring": _ring, "all-gather": _gather, "ulysses": _ulysses}[job.strategy.context_method]
    return method(job, contents, topology)


def _again(job: Job, contents: RankContents) -> float:
    """Share of the layers whose attention runs its forward pass again.

    FlashAttention rebuilds its scores inside its own backward kernel, so selective recompute of attention
    repeats the exchange only where the score matrix is stored.
    """
    if "attention" in job.recomputed_operators:
        return 1.0
    return fully_recomputed_share(job, contents)


def _key_value_features(job: Job) -> float:
    """Features of keys and values together that one tensor-parallel rank holds per token."""
    model = job.model
    heads = model.heads if model.mla else model.key_value_heads
    return heads / min(job.strategy.tp, heads) * (model.query_key_dim + model.value_dim)


def _ring(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Every rank sends its keys and values cp−1 times forward; backward the same and their gradients."""
    strategy, steps = job.strategy, job.strategy.cp - 1
    chunk = job.microbatch_tokens * _key_value_features(job) * job.training.recipe.communication
    calls = contents.layers * job.microbatches * steps

    again = _again(job, contents)

    def line(payload: Payload, count: float, window: Window, repeated: float = 0.0) -> Traffic:
        return priced(
            "cp",
            payload,
            CollectiveKind.SEND_RECV,
            chunk,
            count,
            topology,
            strategy.collective,
            window=window if strategy.overlap.cp else "none",
            repeated=repeated,
        )

    return [
        line(sent_forward(Role.KEYS_AND_VALUES), calls * (1 + again), "attention forward", again / (1 + again)),
        line(sent_backward(Role.KEYS_VALUES_AND_GRADIENTS), 2 * calls, "attention backward"),
    ]


def _gather(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    size = job.microbatch_tokens * job.strategy.cp * _key_value_features(job) * job.training.recipe.communication
    calls, again = contents.layers * job.microbatches, _again(job, contents)
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return [
        _waited_for(job, topology, sent_forward(Role.KEYS_AND_VALUES), gather, size, calls, again),
        _waited_for(job, topology, sent_backward(Role.KEYS_AND_VALUES), gather, size, calls),
        _waited_for(job, topology, sent_backward(Role.THEIR_GRADIENTS), scatter, size, calls),
    ]


def _ulysses(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Queries, keys, values and output change from sequence-split to head-split and back.

    Key-value heads fewer than ranks are repeated until every rank has one.
    """
    model, strategy = job.model, job.strategy
    topology = exchanging(topology, job.cluster)
    heads = model.heads / strategy.tp
    kv_heads = max(_key_value_features(job) / (model.query_key_dim + model.value_dim), strategy.cp)
    kv_heads = min(kv_heads, heads)
    features = (heads + kv_heads) * (model.query_key_dim + model.value_dim)
    size = job.microbatch_tokens * features * job.training.recipe.communication / 4
    calls = 4 * contents.layers * job.microbatches  # q, k, v and the output: four exchanges of this mean size
    exchange = CollectiveKind.ALL_TO_ALL
    return [
        _waited_for(job, topology, sent_forward(Role.HEADS), exchange, size, calls, _again(job, contents)),
        _waited_for(job, topology, sent_backward(Role.THEIR_GRADIENTS), exchange, size, calls),
    ]


def _waited_for(
    job: Job,
    topology: Topology,
    payload: Payload,
    kind: CollectiveKind,
    size: float,
    calls: float,
    again: float = 0.0,
) -> Traffic:
    """What attention needs before it begins, or has when it is done; recompute sends a share of it again."""
    count, repeated = calls * (1 + again), again / (1 + again)
    return priced("cp", payload, kind, size, count, topology, job.strategy.collective, repeated=repeated)
