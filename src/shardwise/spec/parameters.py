"""How many parameters a model has, part by part, whole or on one rank.

The parts matter because each is split differently: attention and MLP by tensor parallelism, experts by
expert parallelism, norms not at all, embeddings only on the ends of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.spec.fine_tuning import EVERYTHING, Adapters, Tuning
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Matrix, Model


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer on one rank; ``experts`` are the routed ones, ``dense`` all the rest."""

    attention: float
    mlp: float
    norms: float
    router: float
    experts: float

    @property
    def dense(self) -> float:
        return self.attention + self.mlp + self.norms + self.router

    @property
    def total(self) -> float:
        return self.dense + self.experts


def layer_parameters(
    model: Model,
    kind: LayerRecord,
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
) -> LayerParameters:
    """Parameters that one rank holds of one layer (of all ranks together when every degree is 1)."""
    attention = _held(model.mixer_matrices(kind), tensor_parallel) + _beside_matrices(model, kind, tensor_parallel)
    norms = model.norms_per_layer * _norm_parameters(model)
    others = model.counted.layer_parameters / model.layers / tensor_parallel if model.counted else 0
    experts = model.experts_of(kind)
    if experts is None:
        mlp = _held(model.mlp_matrices(model.ffn), tensor_parallel) + model.activation_parameters
        return LayerParameters(attention, mlp + others, norms, 0, 0)
    routed = _held(model.mlp_matrices(experts.ffn), expert_tensor_parallel)
    shared = _held(model.mlp_matrices(experts.shared_ffn), tensor_parallel) if experts.shared_ffn else 0
    router = _held(model.router_matrices, 1) + (experts.experts if experts.router_bias else 0)
    return LayerParameters(attention, shared + others, norms, router, routed * experts.experts / expert_parallel)


def embedding_parameters(model: Model, tensor_parallel: int = 1) -> float:
    """Token, position and token-type embeddings; the vocabulary is split by tensor parallelism."""
    tokens = model.vocab * model.hidden / tensor_parallel
    positions = model.max_seq * model.hidden if model.positions == "learned" else 0
    extra = model.token_types * model.hidden + (_norm_parameters(model) if model.embedding_norm else 0)
    if model.counted:  # tables of embeddings, if they are large
        tokens += model.counted.end_parameters / tensor_parallel
    return tokens + positions + extra


def head_parameters(model: Model, tensor_parallel: int = 1) -> float:
    """What follows the last layer: final norm, output projection (if not tied), BERT's heads."""
    final = final_norm_parameters(model)
    pooler = model.hidden * (model.hidden + 1) if model.pooler else 0
    masked = model.hidden * (model.hidden + 1) + _norm_parameters(model) + model.vocab if model.mlm_head else 0
    if model.tied_embeddings:
        projection = model.vocab / tensor_parallel if model.lm_head_bias else 0
    else:
        projection = model.head_matrix.parameters_per_rank(tensor_parallel)
    return final + pooler + masked + projection


def final_norm_parameters(model: Model) -> int:
    """The norm before the head."""
    return _norm_parameters(model) if model.final_norm else 0


def prediction_module_parameters(model: Model, tuning: Tuning = EVERYTHING, **degrees: int) -> TunedLayer:
    """One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437 section 2.2): two norms, a projection
    of the concatenated states and one layer; embedding and head are shared with the main model."""
    beyond = range(model.layers, model.layers + model.mtp_layers)
    layer = tuned_layer(model, tuning, beyond, model.every_layer[-1], **degrees)
    extra = 2 * model.hidden * model.hidden + 3 * _norm_parameters(model)
    share = tuning.trained_share("norms", beyond)
    trained, frozen = (
        replace(kept, norms=kept.norms + part * extra)
        for kept, part in ((layer.trained, share), (layer.frozen, 1 - share))
    )
    return TunedLayer(trained, frozen)


def parameter_count(model: Model, *, with_prediction_modules: bool = False) -> int:
    """All parameters of the model; multi-token-prediction modules only when asked for."""
    total = embedding_parameters(model) + head_parameters(model)
    total += sum(count * layer_parameters(model, kind).total for kind, count in model.layers_of_kinds)
    if with_prediction_modules:
        total += model.mtp_layers * prediction_module_parameters(model).trained.total
    return round(total)


def active_parameter_count(model: Model) -> int:
    """Parameters a token passes through: of the routed experts only the chosen ones."""
    if model.moe is None:
        return parameter_count(model)
    experts = sum(count * layer_parameters(model, kind).experts for kind, count in model.layers_of_kinds)
    return parameter_count(model) - round(experts * (1 - model.moe.top_k / model.moe.experts))


def trained_parameters(model: Model, tuning: Tuning) -> int:
    """Parameters that change: adapters, and the parts that are not frozen."""
    if tuning.everything:
        return parameter_count(model, with_prediction_modules=True)
    total = embedding_parameters(model) * tuning.trains("embedding")
    final = final_norm_parameters(model)
    total += (head_parameters(model) - final) * tuning.trains("head") + final * tuning.trains("norms")
    for layer in range(model.layers):
        total += tuned_layer(model, tuning, (layer,), model.every_layer[layer]).trained.total
    return round(total + model.mtp_layers * prediction_module_parameters(model, tuning).trained.total)


@dataclass(frozen=True)
class TunedLayer:
    """The parameters of the mean of some layers on a rank: what is trained (adapters included), and what is frozen."""

    trained: LayerParameters
    frozen: LayerParameters


def tuned_layer(model: Model, tuning: Tuning, layers: Iterable[int], kind: LayerRecord, **degrees: int) -> TunedLayer:
    """``layer_parameters`` of the mean of ``layers``, divided into what is trained and what is frozen."""
    layers, own = tuple(layers), layer_parameters(model, kind, **degrees)
    attention, norms, router = (tuning.trained_share(part, layers) for part in ("attention", "norms", "router"))
    mlp, experts = tuning.trained_share("mlp", layers), tuning.trained_share("experts", layers)
    added = adapter_parameters(model, tuning.adapters, kind, **degrees) if tuning.adapters else None
    adapted = tuning.adapted_share(layers) if added else 0.0
    trained = LayerParameters(
        own.attention * attention + (added.attention * adapted if added else 0.0),
        own.mlp * mlp + (added.mlp * adapted if added else 0.0),
        own.norms * norms,
        own.router * router,
        own.experts * experts + (added.experts * adapted if added else 0.0),
    )
    frozen = LayerParameters(
        own.attention * (1 - attention),
        own.mlp * (1 - mlp),
        own.norms * (1 - norms),
        own.router * (1 - router),
        own.experts * (1 - experts),
    )
    return TunedLayer(trained, frozen)


def adapter_parameters(
    model: Model,
    adapters: Adapters,
    kind: LayerRecord,
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
) -> LayerParameters:
    """Parameters of the adapters of one layer on a rank."""

    def beside(matrices: Iterable[Matrix], ranks: int) -> float:
        return sum(adapters.parameters(matrix, ranks) for matrix in matrices)

    attention = beside(model.mixer_matrices(kind), tensor_parallel)
    experts = model.experts_of(kind)
    if experts is None:
        return LayerParameters(attention, beside(model.mlp_matrices(model.ffn), tensor_parallel), 0, 0, 0)
    shared = beside(model.mlp_matrices(experts.shared_ffn), tensor_parallel) if experts.shared_ffn else 0.0
    routed = beside(model.mlp_matrices(experts.ffn), expert_tensor_parallel) if adapters.experts else 0.0
    return LayerParameters(attention, shared, 0, 0, routed * experts.experts / expert_parallel)


def _held(matrices: Iterable[Matrix], tensor_parallel: int) -> float:
    return sum(matrix.parameters_per_rank(tensor_parallel) for matrix in matrices)


def _norm_parameters(model: Model, features: int | None = None) -> int:
    each = (2 if model.norm == "layernorm" and model.norm_bias else 1) if model.norm_weight else 0
    return (features or model.hidden) * each


def _beside_matrices(model: Model, kind: LayerRecord, tensor_parallel: int) -> float:
    """Attention may have norms and sinks; a delta net has a convolution, two rates of each head, and a norm."""
    if kind.mixer == "delta" and (delta := model.delta):
        convolution = delta.convolved_features * delta.convolved_tokens
        return (convolution + 2 * delta.value_heads) / tensor_parallel + delta.value_dim
    sinks = model.heads / tensor_parallel if model.attention_sinks else 0
    return _attention_norms(model, tensor_parallel) + sinks


def _attention_norms(model: Model, tensor_parallel: int) -> float:
    """Norms inside attention: per head on q and k (Qwen3), over all heads (OLMo-2), on the latent vectors (MLA)."""
    if model.mla:
        return (model.mla.q_rank or 0) + model.mla.kv_rank
    if not (model.qk_norm and model.qk_norm_weight):
        return 0
    if not model.qk_norm_whole:
        return 2 * _norm_parameters(model, model.head_size)
    query, key, *_ = model.attention_matrices
    return sum(_norm_parameters(model, matrix.outputs) * matrix.share(tensor_parallel) for matrix in (query, key))
