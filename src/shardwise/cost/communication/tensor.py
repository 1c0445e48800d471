"""Tensor parallelism, with and without sequence parallelism.

A column-parallel layer needs no communication on its output: its *input gradient* is all-reduced; the
row-parallel layer all-reduces its output (Shoeybi et al. 2019, arXiv 1909.08053). Sequence parallelism turns
each all-reduce into an all-gather and a reduce-scatter of the same bytes (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2) and gathers the saved inputs once more for the weight gradients.
"""

from __future__ import annotations

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.network import expert_tensor_runs, group_runs, spanned
from shardwise.cost.stages import RankContents
from shardwise.cost.traffic import Traffic, Window, priced
from shardwise.spec.job import Job


def tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives of the tensor-parallel group, and of the group that splits experts."""
    traffics: list[Traffic] = []
    topology = spanned(job.cluster, group_runs(job.strategy, ("tp",)), "strategy.tp")
    if topology is not None:
        traffics += _layer_traffic(job, contents, topology)
        traffics += _vocabulary_traffic(job, contents, topology)
    return traffics + _expert_tensor_traffic(job, contents)


def _blocks(job: Job, contents: RankContents) -> float:
    """Column-then-row pairs on this rank: attention and MLP of a layer, one if they run side by side."""
    model = job.model
    if model.parallel_block:
        return contents.layers
    shared_mlp = 1 if model.moe and model.moe.shared_ffn else 0
    return 2 * contents.dense_layers + (1 + shared_mlp) * contents.moe_layers


def _layer_traffic(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    strategy = job.strategy
    size = job.microbatch_tokens * job.model.hidden * job.training.recipe.communication
    calls = _blocks(job, contents) * job.microbatches
    again = _recomputed_share(job, contents)
    hide = strategy.overlap.tp

    def line(what: str, kind: CollectiveKind, count: float, window: Window) -> Traffic:
        # Overlapped by decomposition into tp pieces, one piece has nothing to run under (Wang et al. 2022).
        return priced(
            "tp",
            what,
            kind,
            size,
            count,
            topology,
            strategy.collective,
            window=window if hide else "none",
            unhideable=1 / strategy.tp,
        )

    if not strategy.sequence_parallel:
        return [
            line("outputs, forward", CollectiveKind.ALL_REDUCE, calls * (1 + again), "forward"),
            line("input gradients, backward", CollectiveKind.ALL_REDUCE, calls, "backward"),
        ]
    regather = priced(
        "tp",
        "saved inputs, backward",
        CollectiveKind.ALL_GATHER,
        size,
        calls,
        topology,
        strategy.collective,
        window="backward",
    )
    return [
        line("inputs, forward", CollectiveKind.ALL_GATHER, calls * (1 + again), "forward"),
        line("outputs, forward", CollectiveKind.REDUCE_SCATTER, calls * (1 + again), "forward"),
        line("output gradients, backward", CollectiveKind.ALL_GATHER, calls, "backward"),
        line("input gradients, backward", CollectiveKind.REDUCE_SCATTER, calls, "backward"),
        regather,
    ]


def _recomputed_share(job: Job, contents: RankContents) -> float:
    """Share of layers whose forward pass, communication included, runs again."""
    if job.strategy.recompute != "full":
        return 0.0
    if job.strategy.recompute_layers is None:
        return 1.0
    return min(1.0, job.strategy.recompute_layers / max(1, contents.layers))


def _vocabulary_traffic(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Vocabulary-parallel embedding and loss on the ends of the pipeline."""
    strategy, m = job.strategy, job.microbatches
    size = job.microbatch_tokens * job.model.hidden * job.training.recipe.communication
    reduce = CollectiveKind.REDUCE_SCATTER if strategy.sequence_parallel else CollectiveKind.ALL_REDUCE
    traffics = []
    if contents.has_embedding:
        traffics.append(priced("tp", "embedding, forward", reduce, size, m, topology, strategy.collective))
    if contents.has_head:
        if strategy.sequence_parallel:
            traffics.append(
                priced(
                    "tp",
                    "head input, forward",
                    CollectiveKind.ALL_GATHER,
                    size,
                    m,
                    topology,
                    strategy.collective,
                )
            )
        traffics.append(priced("tp", "head input gradient, backward", reduce, size, m, topology, strategy.collective))
        # Maximum, target logit and sum of exponentials of every token, fp32.
        loss_size = 3 * 4 * job.microbatch_tokens
        traffics.append(priced("tp", "loss", CollectiveKind.ALL_REDUCE, loss_size, m, topology, strategy.collective))
    return traffics


def _expert_tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Tokens gathered and summed over the ranks that split one expert's matrices."""
    model, strategy = job.model, job.strategy
    if model.moe is None or not contents.moe_layers:
        return []
    topology = spanned(job.cluster, expert_tensor_runs(strategy), "strategy.expert_tp")
    if topology is None:
        return []
    region = job.microbatch_tokens / (strategy.tp if strategy.sequence_parallel else 1)
    routed = region * model.moe.top_k * strategy.expert_tensor_parallel
    size = routed * model.hidden * job.training.recipe.communication
    calls = contents.moe_layers * job.microbatches
    again = _recomputed_share(job, contents)
    return [
        priced(
            "tp",
            "expert tokens, forward",
            CollectiveKind.ALL_GATHER,
            size,
            calls * (1 + again),
            topology,
            strategy.collective,
        ),
        priced(
            "tp",
            "expert outputs, forward",
            CollectiveKind.REDUCE_SCATTER,
            size,
            calls * (1 + again),
            topology,
            strategy.collective,
        ),
        priced(
            "tp",
            "expert output gradients, backward",
            CollectiveKind.ALL_GATHER,
            size,
            calls,
            topology,
            strategy.collective,
        ),
        priced(
            "tp",
            "expert token gradients, backward",
            CollectiveKind.REDUCE_SCATTER,
            size,
            calls,
            topology,
            strategy.collective,
        ),
    ]
