"""Tensor parallelism, with and without sequence parallelism.

A column-parallel layer needs no communication on its output: its *input gradient* is all-reduced; the
row-parallel layer all-reduces its output (Shoeybi et al. 2019, arXiv 1909.08053). Sequence parallelism turns
each all-reduce into an all-gather and a reduce-scatter of the same bytes (Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2) and gathers the saved inputs once more for the weight gradients. Latent attention sends the
latent vectors of a rank's own tokens instead of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.compute.operators import gradient_share
from shardwise.cost.compute.recompute import outputs_left_out, run_again_share, weighted_outputs_left_out
from shardwise.cost.compute.roofline import Seconds
from shardwise.cost.step.stage_time import timed_layer
from shardwise.cost.traffic.traffic import Traffic, Window, in_passes, priced
from shardwise.layout.groups import expected_destinations, expert_tensor_runs, group_runs
from shardwise.layout.network import spanned
from shardwise.layout.payloads import Payload, Phase, Role, Share, sent_backward, sent_forward
from shardwise.layout.pieces import share_beside_products
from shardwise.layout.stages import RankContents, layers_of_kind
from shardwise.spec.fine_tuning import NOTHING, TARGETS, Adapters, Part, Tuning
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MatrixRole, MixtureOfExperts, Split
from shardwise.spec.parameters import tuned_layer
from shardwise.spec.strategy import Strategy


def tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Collectives of the tensor-parallel group, and of the group that splits experts."""
    once = replicated_gradient_traffic(job, contents)
    return [*_split_traffic(job, contents), *once, *in_passes(job, _expert_tensor_traffic(job, contents))]


def tensor_traffic_of_passes(job: Job, contents: RankContents) -> list[Traffic]:
    """All but what is sent once a step."""
    return [*_split_traffic(job, contents), *in_passes(job, _expert_tensor_traffic(job, contents))]


def _split_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Around the split matmuls of the layers, and at the split vocabulary."""
    topology = spanned(job.cluster, group_runs(job.strategy, ("tp",)), "strategy.tp")
    if topology is None:
        return []
    return in_passes(job, _layer_traffic(job, contents, topology) + _vocabulary_traffic(job, contents, topology))


def _blocks(job: Job, contents: RankContents) -> tuple[int, ...]:
    """Column-then-row pairs in the layers of each kind of this rank."""
    return tuple(count * _blocks_of_layer(job, kind) for kind, count in contents.kinds)


def _blocks_of_layer(job: Job, kind: LayerRecord) -> int:
    """Attention and MLP of a layer, counted as one if they run in parallel; of the experts only the shared is split."""
    if _is_one_block(job):
        return 1
    return 2 if _split_mlp(job, kind) else 1


def _split_mlp(job: Job, kind: LayerRecord) -> bool:
    """Whether a layer has an MLP, or a shared expert, that tensor parallelism splits."""
    experts = job.model.experts_of(kind)
    return experts is None or experts.shared_ffn > 0


def _is_one_block(job: Job) -> bool:
    """Whether attention and MLP run in parallel, with their inputs gathered and their outputs summed together."""
    return job.model.parallel_block and job.stack.parallel_blocks == "joined"


def _layer_traffic(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Collectives around the split matmuls of the layers."""
    blocks, again = _blocks(job, contents), run_again_share(job, contents)
    reading = _reading_hidden_states(job, contents)
    inputs = tuple(number * (1 + again) for number in reading)
    outputs = tuple(number + again * (number - left) for number, left in zip(blocks, outputs_left_out(job, contents)))
    if not job.strategy.sequence_parallel:
        reduce = CollectiveKind.ALL_REDUCE
        lines = [
            _Line(sent_forward(Role.OUTPUTS), reduce, blocks, outputs, "row", "forward"),
            _Line(sent_backward(Role.INPUT_GRADIENTS), reduce, reading, reading, "column", "weight_gradient"),
        ]
    else:
        gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
        lines = [
            _Line(sent_forward(Role.INPUTS), gather, reading, inputs, "column", "forward"),
            _Line(sent_forward(Role.OUTPUTS), scatter, blocks, outputs, "row", "forward"),
            _Line(sent_backward(Role.OUTPUT_GRADIENTS), gather, blocks, blocks, "row", "input_gradient"),
            _Line(sent_backward(Role.INPUT_GRADIENTS), scatter, reading, reading, "column", "weight_gradient"),
        ]
        if job.stack.tp_inputs == "shared" or job.strategy.recompute != "full":
            saved = _reading_hidden_states(job, contents, trained_only=True)
            lines.append(_Line(sent_backward(Role.SAVED_INPUTS), gather, saved, saved, "column", "input_gradient"))
    products = _Products(job, contents)
    return [
        *(_beside_its_product(job, topology, line, products) for line in lines),
        *_latent_traffic(job, contents, topology, again),
        *_adapter_traffic(job, contents, topology, again),
        *_wide_norm_traffic(job, contents, topology, again),
    ]


def _reading_hidden_states(job: Job, contents: RankContents, *, trained_only: bool = False) -> tuple[float, ...]:
    """How often split projections of the hidden states gather them in the layers of each kind.

    Once for attention and once for the MLP, or for each of their projections (`Stack.tp_inputs`); latent attention
    sends its latent vectors instead. ``trained_only``: those that have weight gradients.
    """
    counts, tuning = [], job.training.tuning
    for kind, count in contents.kinds:
        attention, mlp = 1, _blocks_of_layer(job, kind) - 1
        if job.stack.tp_inputs == "each" and job.model.mla is None:
            attention, mlp = 3, mlp * (2 if job.model.gated and not job.model.experts_of(kind) else 1)
        if job.model.mla is not None and job.model.mla.q_rank is not None and not _is_one_block(job):
            attention = 0
        shares: list[float] = [1, 1]
        if trained_only and not tuning.everything:
            layers = layers_of_kind(job.model, kind)
            shares = [_of_backward(job, tuning.trained_share(part, layers)) for part in _SPLIT_PARTS]
            shares = [max(shares)] * 2 if _is_one_block(job) else shares
        counts.append(count * (attention * shares[0] + mlp * shares[1]))
    return tuple(counts)


_SPLIT_PARTS: tuple[Part, Part] = ("attention", "mlp")


def _adapter_traffic(job: Job, contents: RankContents, topology: Topology, again: float) -> list[Traffic]:
    """The narrow vectors of adapters beside column-parallel layers, made where their inputs are and sent together.

    Those of row-parallel layers are part of the layers' own sums, unless these are decomposed.
    """
    adapters, strategy, traffics = job.training.adapters, job.strategy, []
    if adapters is None:
        return []
    columns: list[tuple[MatrixRole, ...]] = [(MatrixRole.GATE, MatrixRole.UP) if job.model.gated else (MatrixRole.UP,)]
    if job.model.mla is None:
        columns.append((MatrixRole.QUERY, MatrixRole.KEY, MatrixRole.VALUE))
    elif job.model.mla.q_rank is None:  # other projections of latent attention read what every rank has
        columns.append((MatrixRole.QUERY,))
    rows: list[tuple[MatrixRole, ...]] = []
    if strategy.overlap.tp:
        rows = [(MatrixRole.ATTENTION_OUTPUT,), (MatrixRole.DOWN,)]
    for kind, layers in contents.kinds:
        adapted = job.training.tuning.adapted_share(layers_of_kind(job.model, kind))
        calls = {"forward": adapted, "backward": _of_backward(job, adapted)}
        for group in (*columns, *rows):
            width = adapters.rank * len(adapters.roles.intersection(group))
            split = _split_mlp(job, kind) or not _OF_MLP.issuperset(group)
            if not (layers and adapted and width and split):
                continue
            size = job.computed_tokens * width * job.training.recipe.communication
            for payload, collective, repeated in _around_narrow(strategy.sequence_parallel, group in rows, again):
                often = layers * job.microbatches * calls[payload.in_pass]
                traffics.append(priced("tp", payload, collective, size, often, topology, strategy.collective, repeated))
    return traffics


def _of_backward(job: Job, share: float) -> float:
    """Of the layers through which a gradient flows, the share that some of all layers are: all that are tuned do."""
    flows = gradient_share(job.model, job.training.tuning)
    return share / flows if flows else 0.0


_OF_MLP = frozenset((MatrixRole.GATE, MatrixRole.UP, MatrixRole.DOWN))


def _around_narrow(sequence_parallel: bool, row: bool, again: float) -> Iterator[tuple[Payload, CollectiveKind, float]]:
    forward, backward = sent_forward(Role.NARROW), sent_backward(Role.NARROW_GRADIENTS)
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    if sequence_parallel:
        yield forward, scatter if row else gather, again
        yield backward, gather if row else scatter, 0.0
    else:
        yield backward, CollectiveKind.ALL_REDUCE, 0.0


def _wide_norm_traffic(job: Job, contents: RankContents, topology: Topology, again: float) -> list[Traffic]:
    """Norms over the queries, and over the keys, of all ranks: an fp32 sum of squares a token, and its gradient."""
    if not job.model.qk_norm_whole:
        return []
    size, calls, role = 4 * job.computed_tokens, 2 * contents.layers * job.microbatches, Role.SUMS_OF_SQUARES
    reduced = (CollectiveKind.ALL_REDUCE, size, calls, topology, job.strategy.collective)
    return [priced("tp", sent_forward(role), *reduced, again), priced("tp", sent_backward(role), *reduced, 0.0)]


def _latent_traffic(job: Job, contents: RankContents, topology: Topology, again: float) -> list[Traffic]:
    """Latent vectors, before the up-projections; not overlapped."""
    mla, strategy, calls = job.model.mla, job.strategy, contents.layers * job.microbatches
    if mla is None:
        return []

    def line(payload: Payload, kind: CollectiveKind, features: int, again: float = 0.0, share: float = 1.0) -> Traffic:
        size = job.computed_tokens * features * job.training.recipe.communication
        return priced("tp", payload, kind, size, calls * share, topology, strategy.collective, again)

    narrow, gather = mla.narrow_features, CollectiveKind.ALL_GATHER
    if not strategy.sequence_parallel:
        return [line(sent_backward(Role.LATENT_GRADIENTS), CollectiveKind.ALL_REDUCE, narrow)]
    cut = job.stack.latents == "cut"
    if cut and "up-projection" in job.recomputed_operators:
        again = 1.0
    lines = [
        line(sent_forward(Role.LATENTS), gather, narrow, again),
        line(sent_backward(Role.LATENT_GRADIENTS), CollectiveKind.REDUCE_SCATTER, narrow),
    ]
    trained = job.training.tuning.trained_share("attention", range(job.model.layers))
    if cut and trained:
        lines.append(line(sent_backward(Role.SAVED_LATENTS), gather, narrow - mla.rope_dim, share=trained))
    return lines


@dataclass(frozen=True)
class _Line:
    """A collective of every block, and the pass of the split matmul that it can overlap with."""

    payload: Payload
    kind: CollectiveKind
    once: tuple[float, ...]  # ``times`` without recompute
    times: tuple[float, ...]  # how often it runs for a microbatch, in the layers of each kind
    split: Split  # how the matmul is split
    beside: Literal["forward", "input_gradient", "weight_gradient"]  # the pass of that matmul

    @property
    def independent(self) -> bool:
        """Whether that matmul neither computes nor reads what is sent."""
        return self.payload.role in (Role.INPUT_GRADIENTS, Role.SAVED_INPUTS)


def _beside_its_product(job: Job, topology: Topology, line: _Line, products: _Products) -> Traffic:
    """A line that is hidden as far as it fits beside its matmul.

    Megatron-LM starts the collectives that the next matmul does not depend on before it, and waits for them after
    (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication); TransformerEngine and nanotron too.
    The others overlap only where the matmul is decomposed into tp parts, one of which stays exposed
    (`collectives.decomposed`).
    """
    strategy = job.strategy
    size = job.computed_tokens * job.model.hidden * job.training.recipe.communication
    at_once = line.independent and job.stack.tp_gradients == "beside"
    times = sum(line.times)
    whole = priced("tp", line.payload, line.kind, size, times * job.microbatches, topology, strategy.collective)
    if not times:
        return whole
    whole = whole.but(repeated=1 - sum(line.once) / times)
    if not (at_once or strategy.overlap.tp):
        return whole
    fitting = products.share_beside(line, float(whole.cost.seconds))
    window: Window = "forward" if line.beside == "forward" else "backward"
    return whole.but(window=window, unhideable=1 - fitting * (1.0 if at_once else share_beside_products(strategy.tp)))


class _Products:
    """Seconds of the split matmuls of a rank's layers, by how they are split."""

    def __init__(self, job: Job, contents: RankContents) -> None:
        self._layers: list[dict[Split, list[Seconds]]] = []
        for kind, count in contents.kinds:
            by_split: dict[Split, list[Seconds]] = {"column": [], "row": []}
            for operator, seconds in timed_layer(job, kind) if count else ():
                if operator.split != "none":
                    by_split[operator.split].append(seconds)
            self._layers.append(by_split)

    def share_beside(self, line: _Line, seconds: float) -> float:
        """Share of the line's collectives, each of the given length, that fits beside their matmuls."""
        fitting = 0.0
        for times, by_split in zip(line.times, self._layers):
            shares = [min(1.0, getattr(passes, line.beside) / seconds) for passes in by_split[line.split]]
            fitting += times * sum(shares) / max(1, len(shares))
        return fitting / sum(line.times)


def replicated_gradient_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Gradients of what tensor parallelism does not split (norms, router, latent projections, learned positions).

    Under sequence parallelism each rank has those of its own tokens, summed once per step (Megatron-LM
    finalize_model_grads).
    """
    topology, tuning = spanned(job.cluster, group_runs(job.strategy, ("tp",)), "strategy.tp"), job.training.tuning
    if topology is None or not (job.strategy.sequence_parallel or tuning.adapters):
        return []
    if not job.strategy.sequence_parallel:
        tuning = replace(NOTHING, adapters=_of_row_parallel_layers(tuning.adapters))
    replicated = sum(count * _replicated_parameters(job, tuning, kind) for kind, count in contents.held)
    if contents.has_embedding and job.model.positions == "learned" and tuning.trains("embedding"):
        replicated += job.model.max_seq * job.model.hidden
    size = replicated * job.training.recipe.gradient
    payload = sent_backward(Role.UNSPLIT_GRADIENTS)
    return [priced("tp", payload, CollectiveKind.ALL_REDUCE, size, 1, topology, job.strategy.collective, once=True)]


def _of_row_parallel_layers(adapters: Adapters | None) -> Adapters | None:
    """These see a part of the sum on each rank, however tokens are divided; others have summed narrow vectors."""
    if adapters is None:
        return None
    targets = tuple(name for name in ("o_proj", "down_proj") if adapters.roles.issuperset(TARGETS[name]))
    return replace(adapters, targets=targets) if targets else None


def _replicated_parameters(job: Job, tuning: Tuning, kind: LayerRecord) -> float:
    """Of one layer: a rank holds R + S/t, the layer has R + S, so R = (t·held − whole)/(t − 1)."""
    tp, layers = job.strategy.tp, layers_of_kind(job.model, kind)
    held, whole = (
        tuned_layer(job.model, tuning, layers, kind, tensor_parallel=ranks).trained.dense for ranks in (tp, 1)
    )
    return (tp * held - whole) / (tp - 1)


def _vocabulary_traffic(job: Job, contents: RankContents, topology: Topology) -> list[Traffic]:
    """Vocabulary-parallel embedding and loss on the ends of the pipeline."""
    strategy, m = job.strategy, job.microbatches
    hidden = job.computed_tokens * job.model.hidden * job.training.recipe.communication
    gather = CollectiveKind.ALL_GATHER
    reduce = CollectiveKind.REDUCE_SCATTER if strategy.sequence_parallel else CollectiveKind.ALL_REDUCE

    def line(payload: Payload, kind: CollectiveKind, count: float, size: float = hidden) -> Traffic:
        return priced("tp", payload, kind, size, count, topology, strategy.collective)

    traffics = []
    # Prediction modules look up tokens of their own, beside the head.
    lookups = m * (contents.has_embedding + job.model.mtp_layers * contents.has_head)
    if lookups:
        traffics.append(line(sent_forward(Role.EMBEDDING), reduce, lookups))
        if strategy.sequence_parallel and job.training.tuning.trains("embedding"):
            traffics.append(line(sent_backward(Role.EMBEDDING_GRADIENT), gather, lookups))
    if contents.has_head:
        losses = m * (1 + job.model.mtp_layers)
        if strategy.sequence_parallel and job.stack.loss == "pieces":
            # Its gradients are computed in the forward pass, a few tokens at a time.
            traffics.append(line(sent_forward(Role.HEAD_INPUT), gather, losses))
        elif strategy.sequence_parallel:
            traffics.append(line(Payload(Role.HEAD_INPUT, Phase.BOTH), gather, 2 * losses))
        traffics.append(line(sent_backward(Role.HEAD_INPUT_GRADIENT), reduce, losses))
        logits = 3 * 4 * job.computed_tokens  # maximum, target logit and sum of exponentials of every token, fp32
        traffics.append(line(sent_backward(Role.LOSS), CollectiveKind.ALL_REDUCE, losses, logits))
    return traffics


def _expert_tensor_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Communication around the experts between ranks that split an expert's matrices or hold the same tokens."""
    model, strategy = job.model, job.strategy
    if model.moe is None or not contents.moe_layers:
        return []
    same_tokens = strategy.tp > 1 and not strategy.sequence_parallel
    runs = group_runs(strategy, ("tp",)) if same_tokens else expert_tensor_runs(strategy)
    topology = spanned(job.cluster, runs, "strategy.expert_tp")
    if topology is None:
        return []
    if same_tokens:
        kinds = _around_equal_tokens(strategy.expert_tensor_parallel > 1)
        rows = job.computed_tokens
    else:
        kinds = _AROUND_TOKENS
        copies = _copies_of_a_token(model.moe, strategy)
        rows = job.computed_tokens / strategy.tp * copies * strategy.expert_tensor_parallel
    size = rows * model.hidden * job.training.recipe.communication
    calls = contents.moe_layers * job.microbatches
    share = run_again_share(job, contents)
    repeated = {Role.TOKENS: share, Role.OUTPUTS: share}
    if weighted_outputs_left_out(job, same_tokens=same_tokens):
        del repeated[Role.OUTPUTS]

    sent = (size, calls, topology, strategy.collective)
    return [priced("tp", payload, kind, *sent, repeated.get(payload.role, 0.0)) for payload, kind in kinds]


def _copies_of_a_token(moe: MixtureOfExperts, strategy: Strategy) -> float:
    """When the ranks that split an expert gather tokens: one if all experts are local, one per destination device of a
    deduplicating exchange, else one per chosen expert."""
    if strategy.ep == 1:
        return 1
    if strategy.dispatch == "deduplicated":
        return expected_destinations(moe.experts, strategy.ep, moe.top_k)
    return moe.top_k


_AROUND_TOKENS = (
    (sent_forward(Role.TOKENS, Share.EXPERTS), CollectiveKind.ALL_GATHER),
    (sent_forward(Role.OUTPUTS, Share.EXPERTS), CollectiveKind.REDUCE_SCATTER),
    (sent_backward(Role.OUTPUT_GRADIENTS, Share.EXPERTS), CollectiveKind.ALL_GATHER),
    (sent_backward(Role.TOKEN_GRADIENTS, Share.EXPERTS), CollectiveKind.REDUCE_SCATTER),
)


def _around_equal_tokens(split: bool) -> tuple[tuple[Payload, CollectiveKind], ...]:
    """Ranks with the same tokens sum the outputs of split experts, or each take a share of the tokens and gather."""
    kind = CollectiveKind.ALL_REDUCE if split else CollectiveKind.ALL_GATHER
    return (sent_forward(Role.OUTPUTS, Share.EXPERTS), kind), (sent_backward(Role.TOKEN_GRADIENTS, Share.EXPERTS), kind)
