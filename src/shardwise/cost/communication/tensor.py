"""Tensor parallelism, with and without sequence parallelism.

A column-parallel layer needs no communication on its output: its *input gradient* is all-reduced; the
row-parallel layer all-reduces its output (Shoeybi et al. 2019, arXiv 1909.08053). Sequence parallelism turns
each all-reduce into an all-gather and a reduce-scatter of the same bytes (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2) and gathers the saved inputs once more for the weight gradients.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.network import expert_tensor_runs, group_runs, spanned
from shardwise.cost.overlap import Window
from shardwise.cost.stages import RankContents, fully_recomputed_share
from shardwise.cost.traffic import Traffic, priced
from shardwise.spec.job import Job
from shardwise.spec.parameters import layer_parameters


def tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives of the tensor-parallel group, and of the group that splits experts."""
    traffics: list[Traffic] = []
    topology = spanned(job.cluster, group_runs(job.strategy, ("tp",)), "strategy.tp")
    if topology is not None:
        traffics += _layer_traffic(job, contents, topology)
        traffics += _vocabulary_traffic(job, contents, topology)
        traffics += replicated_gradient_traffic(job, contents)
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
    again = fully_recomputed_share(job, contents)
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
            _beside_weight_gradients(line("input gradients, backward", CollectiveKind.ALL_REDUCE, calls, "backward")),
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


def _beside_weight_gradients(traffic: Traffic) -> Traffic:
    """The input gradient's all-reduce runs beside the weight gradient, which needs no communication.

    Megatron-LM starts it asynchronously; both want the same memory and compute units, so no more than 40% hides
    (what its A100 runs without sequence parallelism show).
    """
    return replace(traffic, window="backward", unhideable=max(0.6, traffic.unhideable))


def replicated_gradient_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Gradients of what tensor parallelism does not split (norms, router, latent projections): under sequence
    parallelism each rank has those of its own tokens, summed once per step (Megatron-LM finalize_model_grads)."""
    topology = spanned(job.cluster, group_runs(job.strategy, ("tp",)), "strategy.tp")
    if topology is None or not job.strategy.sequence_parallel:
        return []
    replicated = sum(
        count * _replicated_parameters(job, moe)
        for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True))
    )
    size = replicated * job.training.recipe.gradient
    what = "gradients of unsplit parameters"
    return [priced("tp", what, CollectiveKind.ALL_REDUCE, size, 1, topology, job.strategy.collective, once=True)]


def _replicated_parameters(job: Job, moe: bool) -> float:
    """Of one layer: a rank holds R + S/t, the layer has R + S, so R = (t·held − whole)/(t − 1)."""
    tp = job.strategy.tp
    held = layer_parameters(job.model, moe=moe, tensor_parallel=tp).dense
    return (tp * held - layer_parameters(job.model, moe=moe).dense) / (tp - 1)


def _vocabulary_traffic(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Vocabulary-parallel embedding and loss on the ends of the pipeline."""
    strategy, m = job.strategy, job.microbatches
    hidden = job.microbatch_tokens * job.model.hidden * job.training.recipe.communication
    gather = CollectiveKind.ALL_GATHER
    reduce = CollectiveKind.REDUCE_SCATTER if strategy.sequence_parallel else CollectiveKind.ALL_REDUCE

    def line(what: str, kind: CollectiveKind, count: float, size: float = hidden) -> Traffic:
        return priced("tp", what, kind, size, count, topology, strategy.collective)

    traffics = []
    if contents.has_embedding:
        traffics.append(line("embedding, forward", reduce, m))
        if strategy.sequence_parallel:
            traffics.append(line("embedding gradient, backward", gather, m))
    if contents.has_head:
        losses = m * (1 + job.model.mtp_layers)
        if strategy.sequence_parallel:
            traffics.append(line("head input, forward and again backward", gather, 2 * losses))
        traffics.append(line("head input gradient, backward", reduce, losses))
        # Maximum, target logit and sum of exponentials of every token, fp32.
        traffics.append(line("loss", CollectiveKind.ALL_REDUCE, losses, 3 * 4 * job.microbatch_tokens))
    return traffics


def _expert_tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Tokens gathered and summed over the ranks that split one expert's matrices."""
    model, strategy = job.model, job.strategy
    if model.moe is None or not contents.moe_layers:
        return []
    topology = spanned(job.cluster, expert_tensor_runs(strategy), "strategy.expert_tp")
    if topology is None:
        return []
    # Without sequence parallelism the gather and the reduce-scatter are one all-reduce of the same bytes.
    routed = job.microbatch_tokens / strategy.tp * model.moe.top_k * strategy.expert_tensor_parallel
    size = routed * model.hidden * job.training.recipe.communication
    calls = contents.moe_layers * job.microbatches
    again = fully_recomputed_share(job, contents)
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
