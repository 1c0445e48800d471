"""The operators of one layer on one device, as split by every dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from shardwise.cost.compute.flops import attended_tokens_of_rank, sees_part
from shardwise.layout.pieces import loss_in_one_piece, loss_tokens_at_once
from shardwise.layout.stages import layers_of_kind
from shardwise.spec.fine_tuning import EVERYTHING, Adapters, Part, Tuning
from shardwise.spec.layers import DELTA_CHUNK, DeltaNet, LayerRecord
from shardwise.spec.model import UP_PROJECTIONS, Matrix, MixtureOfExperts, Model, Split

OperatorKind = Literal["product", "attention", "traffic"]


class OperatorRole(Enum):
    """What an operator does in its layer."""

    PROJECTION = "attention projection"
    ATTENTION = "attention"
    NORMS = "norms and residuals"
    HEAD_NORMS = "norms of heads"
    ROTARY = "rotary embedding"
    STATES = "states of delta nets"
    ACTIVATION = "activation"
    MLP = "MLP"
    ROUTER = "router"
    SCORES = "scores of the router"
    PERMUTE = "permute"
    EXPERTS = "experts"
    EXPERT_BIAS = "biases of experts"
    ADAPTER = "adapters"
    DEQUANTISED = "weights made from codes"
    PREDICTION = "prediction projection"
    HEAD = "head"
    LOSS = "loss"
    HEAD_GRADIENT = "gradient of the head"
    STARTS = "starts of kernels"


@dataclass(frozen=True)
class LayerShape:
    """The sizes that determine a layer's computation on one device."""

    tokens: float  # of one microbatch on one context-parallel rank
    region_tokens: float  # the same, divided by tp under sequence parallelism
    seq: int
    tp: int = 1
    expert_tp: int = 1
    zigzag_ranks: int = 1  # context-parallel ranks among which tokens are split in zig-zag
    context_rank: int = 0  # the one of them whose computation this is
    local_experts: float = 1.0
    dropout: bool = False
    attended_share: float = 1.0  # of the keys of a whole sequence, where documents attend to themselves
    expert_rows: float = 1.0  # times those of balanced routing (`Stack.rows_of_experts`)
    adapters: Literal["16-bit", "fp32", "added", "fused"] = "16-bit"  # as of the `Stack`
    joined: bool = False  # queries, keys and values have one adapter (`Stack.joins_adapters`)


@dataclass(frozen=True)
class Operator:
    """One kernel, or a group of equal ones.

    A product is a matmul of (rows × inner) by (inner × columns). Attention has ``rows`` queries and ``columns`` keys.
    Traffic reads and writes bytes.
    """

    role: OperatorRole
    kind: OperatorKind
    rows: float = 0.0
    columns: float = 0.0
    inner: float = 0.0
    heads: float = 0.0
    attended: float = 1.0  # share of the keys that mask and window leave visible to a query
    windowed: bool = False  # queries attend to a sliding window or a chunk
    capped: bool = False  # scores are capped: c·tanh(x/c)
    dropped: bool = False  # a share of the weights, by dropout
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    eager_forward: float | None = None  # the forward pass's share of all bytes, by PyTorch's own kernels
    kernels: int = 1
    expert: bool = False
    rotary: bool = False  # it is in a layer with rotary embedding
    matrices: float = 1.0  # matrices of a grouped matmul, which divides the rows among them
    wide: bool = False  # it stays in 16 bit in every recipe
    split: Split = "none"  # how tensor parallelism splits it
    recomputed_by: str = ""  # the operator of selective recompute that runs it again
    in_mixture: bool = False  # it is a part of a mixture of experts, which selective recompute may run again as a whole
    alternate: float = 0.0  # share that is run again when every second matmul is recomputed
    ends_layer: bool = False  # only the residual addition reads its result
    flows: float = 1.0  # share of its layers in which a gradient of its inputs is needed
    trained: float = 1.0  # share of its layers whose weights are trained, and so have a gradient

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.columns * self.inner


def layer_operators(
    model: Model, shape: LayerShape, kind: LayerRecord, tuning: Tuning = EVERYTHING
) -> tuple[Operator, ...]:
    """Every operator of one layer, the mean of all of its kind."""
    last, experts = ends_with_product(model, kind), model.experts_of(kind)
    attention = (*_projections(model, shape, kind), *_mixed(model, shape, kind), *_elementwise(model, shape, kind))
    mlp = _experts(model, shape, experts, last) if experts else _mlp(model, shape, model.ffn, last)
    rotary, expert = model.rotates(kind), experts is not None
    starts = Operator(OperatorRole.STARTS, "traffic", kernels=0, expert=expert, rotary=rotary)
    operators = (*attention, *mlp, starts)
    if model.counted and (columns := model.counted.layer_flops / (2 * model.hidden * shape.tp)):
        operators += (Operator(OperatorRole.MLP, "product", shape.tokens, columns, model.hidden, split="column"),)
    return operators if tuning.everything else tuple(tuned_operators(operators, model, shape, kind, tuning))


def ends_with_product(model: Model, kind: LayerRecord) -> bool:
    """Whether a layer ends with a matmul whose result only the residual addition reads, and no backward pass.

    Not where a norm follows (Gemma 2), nor where a router weights the outputs of experts or a gate that of a shared
    expert: their backward passes read it.
    """
    if model.norms_per_layer > 2 or model.norm_after:
        return False
    experts = model.experts_of(kind)
    return experts is None or (experts.shared_ffn > 0 and not experts.shared_gate)


# -- What fine-tuning leaves out of these operators and adds to them


def gradient_share(model: Model, tuning: Tuning) -> float:
    """Share of the layers through which a gradient flows: none does below the first that has something to train."""
    if tuning.everything:
        return 1.0
    first, layers = tuning.first_trained(model), model.layers + model.mtp_layers
    if first is None:
        return 0.0
    if tuning.of_layers is None:
        return 1 - max(0, first) / layers
    return sum(layer >= first for layer in tuning.of_layers) / max(1, len(tuning.of_layers))


def reaches_head(model: Model, tuning: Tuning) -> bool:
    """Whether a gradient flows through the head to what is trained before it."""
    return tuning.first_trained(model) is not None or tuning.trains("norms")


def trains_head(model: Model, tuning: Tuning) -> bool:
    return tuning.trains("head") or (model.tied_embeddings and tuning.trains("embedding"))


_TRAINED_PARTS: dict[OperatorRole, Part] = {
    OperatorRole.PROJECTION: "attention",
    OperatorRole.MLP: "mlp",
    OperatorRole.EXPERTS: "experts",
    OperatorRole.ROUTER: "router",
    OperatorRole.PREDICTION: "norms",
}


def tuned_operators(
    operators: Iterable[Operator], model: Model, shape: LayerShape, kind: LayerRecord, tuning: Tuning
) -> Iterator[Operator]:
    """The operators with the gradients that are needed, weights made from codes before each use, and adapters."""
    layers, flows = layers_of_kind(model, kind), gradient_share(model, tuning)
    base = tuning.base.bytes if tuning.base.quantised else None
    for operator in operators:
        part = _TRAINED_PARTS.get(operator.role) if operator.kind == "product" else None
        trained = tuning.trained_share(part, layers) if part else flows
        yield replace(operator, flows=flows, trained=trained)
        if part and base is not None and not operator.wide:
            # Codes and scales are read and 16-bit weights written, for the product and again for its input's gradient.
            weights = (1 - trained) * operator.matrices * operator.inner * operator.columns
            moved = (base + 2) * weights
            yield Operator(OperatorRole.DEQUANTISED, "traffic", rows=weights, forward_bytes=moved, backward_bytes=moved,
                           flows=flows, trained=flows, in_mixture=operator.in_mixture)  # fmt: skip
    if tuning.adapters is not None:
        yield from _adapters(model, shape, kind, tuning.adapters, tuning.adapted_share(layers), flows)


def _adapters(
    model: Model, shape: LayerShape, kind: LayerRecord, adapters: Adapters, adapted: float, flows: float
) -> Iterator[Operator]:
    """The two products beside each matrix, and what adds their result to its own; in an ``adapted`` share of layers."""
    attention = model.mixer_matrices(kind)
    if shape.joined and model.mla is None and kind.mixer != "delta":
        own = [matrix for matrix in attention[:-1] if adapters.adapts(matrix)]
        outputs = round(sum(matrix.outputs * matrix.share(shape.tp) for matrix in own) * shape.tp)
        attention = (*(replace(matrix, outputs=outputs, groups=0) for matrix in own[:1]), attention[-1])
    for matrix in attention:
        rows = shape.region_tokens if matrix.split == "none" else shape.tokens
        yield from _adapter(matrix, adapters, shape, rows * adapted, shape.tp, flows)
    experts = model.experts_of(kind)
    if experts is None:
        for matrix in model.mlp_matrices(model.ffn):
            yield from _adapter(matrix, adapters, shape, shape.tokens * adapted, shape.tp, flows)
        return
    for matrix in model.mlp_matrices(experts.shared_ffn) if experts.shared_ffn else ():
        yield from _adapter(matrix, adapters, shape, shape.tokens * adapted, shape.tp, flows, in_mixture=True)
    if adapters.experts:
        routed = shape.tokens / shape.tp * experts.top_k * shape.expert_tp * adapted
        for matrix in model.mlp_matrices(experts.ffn):
            yield from _adapter(
                matrix, adapters, shape, routed, shape.expert_tp, flows, shape.local_experts, in_mixture=True
            )


def _adapter(
    matrix: Matrix,
    adapters: Adapters,
    shape: LayerShape,
    rows: float,
    ranks: int,
    flows: float,
    matrices: float = 1.0,
    *,
    in_mixture: bool = False,
) -> Iterator[Operator]:
    if not adapters.adapts(matrix) or not rows:
        return
    share, rank = matrix.share(ranks), float(adapters.rank)
    inner = matrix.inputs * (share if matrix.split == "row" else 1)
    columns = matrix.outputs * (share if matrix.split == "column" else 1)
    each: dict[str, Any] = {"expert": matrices > 1, "matrices": matrices, "flows": flows, "in_mixture": in_mixture}
    yield Operator(OperatorRole.ADAPTER, "product", rows, rank, inner, **each)
    yield Operator(OperatorRole.ADAPTER, "product", rows, columns, rank, **each)
    # In 16 bit. Forward: scaled (4 bytes an output), and added to the layer's own output (6). Backward: scaled (4), and
    # the gradient of the input added to the layer's own (6). Dropout reads and writes the input, and keeps a mask (5).
    forward, backward = 10 * rows * columns, rows * (4 * columns + 6 * inner)
    dropout_bytes = 5.0
    if shape.adapters == "fused":  # each second product adds to what is there
        forward, backward = 2 * rows * columns, 2 * rows * inner
    elif shape.adapters == "added":
        # What narrow products read and write, which takes longer than their arithmetic. Forward: the input, and the
        # layer's output before and after. Backward: the gradient twice, the input, and its gradient (2), added (6).
        forward, backward = rows * (2 * inner + 4 * columns), rows * (4 * columns + 10 * inner)
    elif shape.adapters == "fp32":  # the input is cast to fp32 and back, and so is its gradient
        forward, backward, dropout_bytes = forward + 12 * rows * inner, backward + 12 * rows * inner, 9.0
    if adapters.dropout and shape.adapters == "added":  # drawn again in the backward pass, which drops gradients too
        forward, backward = forward + 4 * rows * inner, backward + 8 * rows * inner
    elif adapters.dropout:
        forward, backward = forward + dropout_bytes * rows * inner, backward + dropout_bytes * rows * inner
    if adapters.method == "dora":
        # PEFT's DoraLinearLayer: B·A is multiplied out, scaled, added to the weight, and its rows are measured (14
        # bytes a weight); outputs are multiplied by the ratio of lengths (10 and 8). This engine reads the weight for
        # its rows' lengths and for W·Aᵀ, and makes no sum (4; outputs: 4 and 8).
        yield Operator(OperatorRole.ADAPTER, "product", columns * matrices, inner, rank, flows=0.0, trained=0.0)
        weight, output = (4, 4) if shape.adapters == "added" else (14, 10)
        forward += weight * columns * inner * matrices + output * rows * columns
        backward += 8 * rows * columns
    yield Operator(OperatorRole.ADAPTER, "traffic", forward_bytes=forward, backward_bytes=backward, kernels=2,
                   flows=flows, trained=flows, in_mixture=in_mixture)  # fmt: skip


def _product(matrix: Matrix, rows: float, tensor: int, **options: object) -> Operator:
    share = matrix.share(tensor)
    inner = matrix.inputs * (share if matrix.split == "row" else 1)
    columns = matrix.outputs * (share if matrix.split == "column" else 1)
    return Operator(OperatorRole.PROJECTION, "product", rows, columns, inner, split=matrix.split, **options)  # type: ignore[arg-type]


def _projections(model: Model, shape: LayerShape, kind: LayerRecord) -> list[Operator]:
    """Queries, keys and values in one matmul where they share their input, and the output projection."""
    *inputs, output = model.mixer_matrices(kind)
    if model.mla is None:
        widths = [matrix.outputs * matrix.share(shape.tp) for matrix in inputs]
        columns = sum(widths)
        # Of query, key and value the second is recomputed.
        first = [
            Operator(OperatorRole.PROJECTION, "product", shape.tokens, columns, model.hidden, split="column",
                     alternate=widths[1] / columns)
        ]  # fmt: skip
    else:
        first = [
            _product(matrix, shape.region_tokens if matrix.split == "none" else shape.tokens, shape.tp,
                     recomputed_by="up-projection" if matrix.role in UP_PROJECTIONS else "")
            for matrix in inputs
        ]  # fmt: skip
    return [*first, _product(output, shape.tokens, shape.tp, alternate=1.0)]


def _mixed(model: Model, shape: LayerShape, kind: LayerRecord) -> list[Operator]:
    """What brings tokens together."""
    if kind.mixer == "delta" and model.delta:
        return _states(model.delta, shape)
    return [_attention(model, shape, kind)]


def _states(delta: DeltaNet, shape: LayerShape) -> list[Operator]:
    """A gated delta net between its projections, as flash-linear-attention runs it (ops/gated_delta_rule/chunk.py).

    Bytes of the kernels in turn, of a head: products of keys, their triangular matrix inverted, its products with keys
    and values, the states of all chunks, the output; the backward pass makes states again, reads what the forward pass
    read, and writes its gradients. Beside them the convolution, and the norm and the gate of the output. Not measured.
    """
    rows, heads, keys, values = shape.tokens, delta.value_heads / shape.tp, delta.key_dim, delta.value_dim
    of_chunk, states = DELTA_CHUNK, keys * values / DELTA_CHUNK
    moved = 2 * heads * (7 * keys + 6 * values + 5 * of_chunk + 2 * states)
    around = 4 * delta.convolved_features / shape.tp + 8 * delta.value_features / shape.tp
    columns = delta.head_flops / (2 * keys)
    return [
        Operator(OperatorRole.STATES, "product", rows * heads, columns, keys, wide=True),
        Operator(OperatorRole.STATES, "traffic", forward_bytes=rows * (moved + around),
                 backward_bytes=rows * (3 * moved + 1.5 * around), kernels=8),
    ]  # fmt: skip


def _attention(model: Model, shape: LayerShape, kind: LayerRecord) -> Operator:
    """Scores and weighted values of this device's heads; ``columns`` are keys, ``inner`` the head's features."""
    heads = model.heads / shape.tp
    features = (model.query_key_dim + model.value_dim) * heads
    attended = attended_tokens_of_rank(model, shape.seq, kind, shape.zigzag_ranks, shape.context_rank) / shape.seq
    attended *= shape.attended_share
    return Operator(OperatorRole.ATTENTION, "attention", shape.tokens, shape.seq, features, heads, attended,
                    windowed=sees_part(model, shape.seq, kind), capped=model.numerics.attention_softcap is not None,
                    dropped=shape.dropout, recomputed_by="attention")  # fmt: skip


def _elementwise(model: Model, shape: LayerShape, kind: LayerRecord) -> list[Operator]:
    """Norms, residuals and rotary embedding, in 16 bit.

    Two norms and two residual additions read and write 10 tensors of h per token forward and 12 backward. PyTorch's own
    kernels: 10 and 25, of which 15 add gradients. Rotary embedding: in fp32, in halves of tensors, 24 and 44.
    """
    hidden = model.hidden * shape.region_tokens
    operators = [Operator(OperatorRole.NORMS, "traffic", forward_bytes=20 * hidden, backward_bytes=24 * hidden,
                          eager_forward=10 / 35, kernels=4, recomputed_by="norm")]  # fmt: skip
    if kind.mixer == "delta":
        return operators
    heads = model.heads / shape.tp + model.key_value_heads / min(shape.tp, model.key_value_heads)
    moved = 4 * heads * model.query_key_dim * shape.tokens
    if model.qk_norm:  # reads one tensor and writes one; backward it also reads the gradient
        operators.append(Operator(OperatorRole.HEAD_NORMS, "traffic", forward_bytes=moved, backward_bytes=1.5 * moved,
                                  kernels=0))  # fmt: skip
    if model.rotates(kind):
        operators.append(Operator(OperatorRole.ROTARY, "traffic", forward_bytes=moved, backward_bytes=moved,
                                  eager_forward=24 / 68, kernels=2))  # fmt: skip
    return operators


def _activation(model: Model, elements: float, *, in_mixture: bool = False) -> Operator:
    """Gated: two inputs and one output of ``elements``; plain: one and one.

    PyTorch's own kernels of a gated one move 5 tensors forward and 11 backward, where they compute SiLU again.
    """
    forward, backward = (6, 10) if model.gated else (4, 6)
    return Operator(OperatorRole.ACTIVATION, "traffic", forward_bytes=forward * elements,
                    backward_bytes=backward * elements, eager_forward=5 / 16 if model.gated else None,
                    recomputed_by="activation", in_mixture=in_mixture)  # fmt: skip


def _mlp(model: Model, shape: LayerShape, width: float, last: bool, *, in_mixture: bool = False) -> list[Operator]:
    up, down = (2 if model.gated else 1) * width / shape.tp, width / shape.tp
    alternate = 0.5 if model.gated else 0.0
    return [
        Operator(OperatorRole.MLP, "product", shape.tokens, up, model.hidden, split="column", alternate=alternate,
                 recomputed_by="mlp-up", in_mixture=in_mixture),
        _activation(model, shape.tokens * width / shape.tp, in_mixture=in_mixture),
        Operator(OperatorRole.MLP, "product", shape.tokens, model.hidden, down, split="row", ends_layer=last,
                 in_mixture=in_mixture),
    ]  # fmt: skip


def _experts(model: Model, shape: LayerShape, moe: MixtureOfExperts, last: bool) -> list[Operator]:
    """Router, permutation and grouped matmuls of the experts on this device, balanced or padded to the fullest."""
    # Tensor-parallel ranks divide the tokens even where all of them hold the same (no sequence parallelism).
    own = shape.tokens / shape.tp * moe.top_k
    routed = own * shape.expert_tp * shape.expert_rows
    width = moe.ffn / shape.expert_tp
    up = (2 if model.gated else 1) * width
    moved = 4 * model.hidden * own
    scores = 8 * moe.experts * shape.region_tokens  # fp32, read and written
    whole: dict[str, Any] = {"in_mixture": True}
    operators = [
        Operator(OperatorRole.ROUTER, "product", shape.region_tokens, moe.experts, model.hidden, wide=True, **whole),
        Operator(OperatorRole.SCORES, "traffic", forward_bytes=scores, backward_bytes=scores, kernels=0, **whole),
        Operator(OperatorRole.PERMUTE, "traffic", forward_bytes=moved, backward_bytes=moved, kernels=3, **whole),
        Operator(OperatorRole.EXPERTS, "product", routed, up, model.hidden, expert=True, matrices=shape.local_experts,
                 **whole),
        _activation(model, routed * width, in_mixture=True),
        Operator(OperatorRole.EXPERTS, "product", routed, model.hidden, width, expert=True,
                 matrices=shape.local_experts, **whole),
    ]  # fmt: skip
    if model.mlp_bias:
        # Megatron-LM's experts.py: the output's bias is weighted and added in fp32, expert by expert (_apply_bias);
        # biased inputs of the activation are clamped and joined again (weighted_bias_quick_geglu_impl).
        operators.append(
            Operator(OperatorRole.EXPERT_BIAS, "traffic", forward_bytes=routed * (28 * model.hidden + 8 * up),
                     backward_bytes=routed * (36 * model.hidden + 12 * up), kernels=8, **whole)
        )  # fmt: skip
    return operators + (_mlp(model, shape, moe.shared_ffn, last, in_mixture=True) if moe.shared_ffn else [])


def ends_operators(model: Model, shape: LayerShape, tuning: Tuning = EVERYTHING) -> tuple[Operator, ...]:
    """What follows the layers of the last stage: the head, and prediction modules apart from their layers."""
    operators = head_operators(model, shape) + model.mtp_layers * prediction_operators(model, shape)
    if tuning.everything:
        return operators
    flows = 1.0 * reaches_head(model, tuning)
    trained = 1.0 * trains_head(model, tuning)
    return tuple(
        replace(operator, flows=flows, trained=trained)
        for operator in operators
        if trained or operator.role is not OperatorRole.HEAD_GRADIENT
    )


def prediction_operators(model: Model, shape: LayerShape) -> tuple[Operator, ...]:
    """A multi-token-prediction module apart from its layer: a projection of two states, and the head again."""
    projection = Operator(OperatorRole.PREDICTION, "product", shape.region_tokens, model.hidden, 2 * model.hidden)
    return (projection, *head_operators(model, shape))


def head_operators(model: Model, shape: LayerShape) -> tuple[Operator, ...]:
    """Output projection and loss of the last stage; the logits stay in 16 bit in every recipe."""
    logits = shape.tokens * model.vocab / shape.tp
    # Where logits are made in pieces, the head's gradient is summed in fp32: set to zero, read and written for each
    # piece, then scaled to 16 bits. In one piece it is only written and scaled. The embedding's gradient is set to
    # zero, and added to a tied head's.
    at_once = loss_tokens_at_once(shape.tokens, model.vocab / shape.tp, model.hidden, trains_head=True)
    in_one_piece = loss_in_one_piece(shape.tokens, model.hidden, trains_head=True)
    moved = 6 if in_one_piece else 8 * math.ceil(shape.tokens / at_once) + 10
    summed = (moved + 2 + 6 * model.tied_embeddings) * model.hidden * model.vocab / shape.tp
    return (
        Operator(OperatorRole.HEAD, "product", shape.tokens, model.vocab / shape.tp, model.hidden, wide=True),
        Operator(OperatorRole.LOSS, "traffic", forward_bytes=5 * logits, backward_bytes=5 * logits, kernels=2),
        Operator(OperatorRole.HEAD_GRADIENT, "traffic", forward_bytes=summed, kernels=0),
    )
