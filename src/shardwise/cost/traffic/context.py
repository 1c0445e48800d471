"""Context parallelism: ring attention, all-gather of keys and values, or Ulysses.

Ring attention passes keys and values around, overlapped with its own blocks (Liu et al. 2023, arXiv 2310.01889);
Llama 3 gathers keys and values (arXiv 2407.21783, section 3.3.2); Ulysses exchanges sequence for heads by
all-to-all (Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.compute.operators import gradient_share
from shardwise.cost.compute.recompute import run_again_share
from shardwise.cost.memory.activations import key_value_features
from shardwise.cost.traffic.traffic import Traffic, Window, in_passes, priced
from shardwise.layout.groups import group_runs
from shardwise.layout.network import Neighbours, spanned
from shardwise.layout.payloads import Payload, Role, sent_backward, sent_forward
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def context_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives of the context-parallel group in attention."""
    neighbours: Neighbours = "all" if job.strategy.context_method == "ulysses" else "ring"
    topology = spanned(job.cluster, group_runs(job.strategy, ("cp",)), "strategy.cp", neighbours)
    if topology is None or not contents.layers:
        return []
    method = {"ring": _ring, "all-gather": _gather, "ulysses": _ulysses}[job.strategy.context_method]
    return in_passes(job, method(job, contents, topology))


def _again(job: Job, contents: RankContents) -> float:
    """Share of the layers whose attention is recomputed.

    FlashAttention recomputes its scores inside its backward kernel, so selective recompute of attention repeats the
    exchange only where the score matrix is stored.
    """
    if "attention" in job.recomputed_operators:
        return gradient_share(job.model, job.training.tuning)
    return run_again_share(job, contents)


def _ring(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Every rank sends its keys and values cp−1 times in the forward pass; in the backward also their gradients."""
    strategy, message = job.strategy, CollectiveKind.SEND_RECV
    chunk = job.computed_tokens * key_value_features(job) * job.training.recipe.communication
    calls = contents.layers * job.microbatches * (strategy.cp - 1)

    def line(payload: Payload, count: float, window: Window, again: float = 0) -> Traffic:
        under: Window = window if strategy.overlap.cp else "none"
        return priced("cp", payload, message, chunk, count, topology, strategy.collective, again, window=under)

    return [
        line(sent_forward(Role.KEYS_AND_VALUES), calls, "attention forward", _again(job, contents)),
        line(sent_backward(Role.KEYS_VALUES_AND_GRADIENTS), 2 * calls, "attention backward"),
    ]


def _gather(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    size = job.computed_tokens * job.strategy.cp * key_value_features(job) * job.training.recipe.communication
    exposed = (size, contents.layers * job.microbatches, topology, job.strategy.collective)
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return [
        priced("cp", sent_forward(Role.KEYS_AND_VALUES), gather, *exposed, _again(job, contents)),
        priced("cp", sent_backward(Role.KEYS_AND_VALUES), gather, *exposed, 0.0),
        priced("cp", sent_backward(Role.THEIR_GRADIENTS), scatter, *exposed, 0.0),
    ]


def exchanged_features(job: Job) -> float:
    """Features of queries, keys, values and output together that one tensor-parallel rank has per token."""
    model, strategy = job.model, job.strategy
    heads = model.heads / strategy.tp
    kv_heads = min(max(key_value_features(job) / (model.query_key_dim + model.value_dim), strategy.cp), heads)
    return (heads + kv_heads) * (model.query_key_dim + model.value_dim)


def _ulysses(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Queries, keys, values and output are exchanged from sequence-split to head-split and back.

    If there are fewer key-value heads than ranks, they are repeated until every rank has one.
    """
    strategy = job.strategy
    size = job.computed_tokens * exchanged_features(job) * job.training.recipe.communication / 4
    calls = 4 * contents.layers * job.microbatches  # q, k, v and the output: four exchanges of this mean size
    exposed = (CollectiveKind.ALL_TO_ALL, size, calls, topology, strategy.collective)
    return [
        priced("cp", sent_forward(Role.HEADS), *exposed, _again(job, contents)),
        priced("cp", sent_backward(Role.THEIR_GRADIENTS), *exposed, 0.0),
    ]
