"""The floating-point operations of training, by each published way of counting.

One multiply-add is two operations. The backward pass costs twice the forward pass: one matmul for the
input gradient, one for the weight gradient (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.spec.fine_tuning import EVERYTHING, NOTHING, Tuning
from shardwise.spec.layers import LayerRecord, Mixer
from shardwise.spec.model import Matrix, Model
from shardwise.spec.parameters import (
    active_parameter_count,
    embedding_parameters,
    trained_parameters,
    tuned_layer,
)


@dataclass(frozen=True)
class LayerFlops:
    """Forward FLOPs of one layer per token: matmuls, and attention over the sequence or what makes and reads states."""

    matrices: float
    attention: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def attended_tokens(model: Model, seq: int, kind: LayerRecord, *, halve_causal: bool = True) -> float:
    """Keys that a query of such a layer attends to, mean over a sequence.

    ``halve_causal`` leaves out those that a causal mask hides.
    """
    if kind.mixer == "delta":
        return 0.0
    return _attended(kind.mixer, model.span_of(kind.mixer), seq, masked=model.causal and halve_causal)


def attended_tokens_of_rank(model: Model, seq: int, kind: LayerRecord, ranks: int, rank: int) -> float:
    """`attended_tokens` of a context rank whose tokens are split in zig-zag: chunks r and 2·cp−1−r of 2·cp.

    Plain causal attention costs the same on all ranks. Windows and chunks do not: their first queries see less.
    """
    if ranks == 1 or not model.causal or not sees_part(model, seq, kind):
        return attended_tokens(model, seq, kind)
    half, span = seq / (2 * ranks), model.span_of(kind.mixer) or seq
    starts = (rank * half, seq - (rank + 1) * half)
    before = [_seen_before(kind.mixer, span, place) for start in starts for place in (start, start + half)]
    return (before[1] - before[0] + before[3] - before[2]) / (2 * half)


def _attending(model: Model) -> int:
    """Layers with attention, prediction modules apart."""
    return sum(count for kind, count in model.layers_of_kinds if kind.mixer != "delta")


def _mean_attended(model: Model, seq: int, *, halve_causal: bool) -> float:
    """`attended_tokens` of the mean layer."""
    if len(model.kinds) == 1:
        return attended_tokens(model, seq, *model.kinds, halve_causal=halve_causal)
    seen = (count * attended_tokens(model, seq, kind, halve_causal=halve_causal) for kind, count in _all_layers(model))
    return sum(seen) / len(model.every_layer)


def sees_part(model: Model, seq: int, kind: LayerRecord) -> bool:
    """Whether a query of such a layer attends to a part of the keys only, beside what a causal mask hides."""
    return not _sees_all(model.span_of(kind.mixer), seq)


def _sees_all(span: int | None, seq: int) -> bool:
    return span is None or span >= seq


def _attended(mixer: Mixer, span: int | None, seq: int, *, masked: bool) -> float:
    """Keys that a query of one layer attends to, mean over a sequence."""
    if _sees_all(span, seq):
        return seq / 2 if masked else float(seq)
    assert span
    if masked:
        return _seen_before(mixer, span, seq) / seq
    if mixer == "window":
        return float(span)
    whole, rest = divmod(seq, span)
    return (whole * span * span + rest * rest) / seq


def _seen_before(mixer: Mixer, span: int, place: float) -> float:
    """Pairs of a causal query before ``place`` and a key that it sees."""
    if mixer == "chunk":
        whole, rest = divmod(place, span)
        return (whole * span * span + rest * rest) / 2
    return place * place / 2 if place <= span else span * (place - span / 2)


def layer_forward_flops(model: Model, seq: int, kind: LayerRecord, *, halve_causal: bool = True) -> LayerFlops:
    """Forward FLOPs per token of one layer."""
    matrices = _matmul_flops(model.mixer_matrices(kind))
    if moe := model.experts_of(kind):
        experts = moe.top_k * _matmul_flops(model.mlp_matrices(moe.ffn))
        matrices += experts + _matmul_flops(model.router_matrices)
        if moe.shared_ffn:
            matrices += _matmul_flops(model.mlp_matrices(moe.shared_ffn))
    else:
        matrices += _matmul_flops(model.mlp_matrices(model.ffn))
    if model.counted:
        matrices += model.counted.layer_flops
    attended = attended_tokens(model, seq, kind, halve_causal=halve_causal)
    if kind.mixer == "delta" and (delta := model.delta):
        return LayerFlops(matrices, delta.value_heads * delta.head_flops + delta.convolution_flops)
    # Scores: 2·d_qk per key and head; weighted values: 2·d_v per key and head.
    attention = 2 * model.heads * (model.query_key_dim + model.value_dim) * attended
    return LayerFlops(matrices, attention)


def head_forward_flops(model: Model) -> float:
    """Forward FLOPs per token of the output projection, tied or not."""
    return 2 * model.head_matrix.inputs * model.head_matrix.outputs


def forward_flops(model: Model, seq: int, *, halve_causal: bool = True) -> float:
    """Forward FLOPs per token of the whole model, including its multi-token-prediction modules."""
    layers = _layers_forward_flops(model, seq, halve_causal=halve_causal)
    return layers + head_forward_flops(model) + prediction_forward_flops(model)


def prediction_forward_flops(model: Model) -> float:
    """Multi-token-prediction modules apart from their layers: a projection of two states to one, and the head."""
    return model.mtp_layers * (2 * 2 * model.hidden * model.hidden + head_forward_flops(model))


def _layers_forward_flops(model: Model, seq: int, *, halve_causal: bool) -> float:
    """All layers, including those of multi-token-prediction modules."""
    return sum(
        count * layer_forward_flops(model, seq, kind, halve_causal=halve_causal).total
        for kind, count in _all_layers(model)
    )


def _all_layers(model: Model) -> Iterator[tuple[LayerRecord, int]]:
    """How many layers of each kind there are, prediction modules included."""
    return zip(model.kinds, model.count_kinds(range(len(model.every_layer))))


def _matmul_flops(matrices: Iterable[Matrix]) -> float:
    return sum(2 * matrix.inputs * matrix.outputs for matrix in matrices)


@dataclass(frozen=True)
class Convention:
    """One published way to count training FLOPs per token; the symbols are those of `flops_symbols`."""

    name: str
    formula: str
    source: str


CONVENTIONS = (
    Convention("causal", "3·(2·W + 2·A·H·(Q + V)·K)",
               "Megatron-Core training.py and NVIDIA Megatron-Bridge tables: causal attention counted once"),
    Convention("full-attention", "3·(2·W + 2·A·H·(Q + V)·K_f)",
               "Narayanan et al. 2021 (arXiv 2104.04473) eq. 3 without recompute; Korthikanti et al. 2022 eq. 7"),
    Convention("6nd", "6·N", "Kaplan et al. 2020 (arXiv 2001.08361)"),
    Convention("palm", "6·N + 6·L·H·(Q + V)·s",
               "Chowdhery et al. 2022 (arXiv 2204.02311) appendix B: 12·L·H·Q·T, where V is Q and T is s"),
    Convention("torchtitan", "6·(N − E) + 6·L·H·(Q + V)·s", "TorchTitan get_nparams_and_flops"),
)  # fmt: skip


def flops_symbols(model: Model, seq: int) -> tuple[tuple[str, str, float], ...]:
    """What the conventions' formulas stand on: symbol, meaning, value."""
    layers = model.layers + model.mtp_layers
    per_key = 2 * layers * model.heads * (model.query_key_dim + model.value_dim)
    weights = f"weights of the matmuls that a token passes through{', half its FLOPs in states' if model.delta else ''}"
    seen, all_keys = (_mean_attended(model, seq, halve_causal=halved) for halved in (True, False))
    return (
        ("W", weights, (forward_flops(model, seq) - per_key * seen) / 2),
        ("N", "parameters that a token passes through", active_parameter_count(model)),
        ("E", "of them, the embedding", embedding_parameters(model)),
        ("L", "layers with attention" if model.delta else "layers", _attending(model)),
        ("A", "layers with those of multi-token prediction", layers),
        ("H", "heads", model.heads),
        ("Q", "dimensions of a query", model.query_key_dim),
        ("V", "dimensions of a value", model.value_dim),
        ("s", "tokens of a sequence", seq),
        ("K", "keys that a query sees, on average", seen),
        ("K_f", "the same if the causal mask hides none", all_keys),
    )


def flops_per_token(model: Model, seq: int, convention: str = "causal", tuning: Tuning = EVERYTHING) -> float:
    """Training FLOPs (forward and backward, nothing recomputed) per token, counted by ``convention``.

    Frozen weights have no gradients, and below the first trained layer none flow: LoRA takes 4 FLOPs of a weight and
    token where training takes 6 (NVIDIA counts so: NeMo AutoModel's and Megatron-Bridge's performance pages).
    """
    if not tuning.everything:
        return flops_per_token(model, seq, convention) * _tuned_share(model, seq, tuning)
    # 12·L·H·Q·T; where queries and values differ in size (MLA), Q is their mean.
    attention = 6 * _attending(model) * model.heads * (model.query_key_dim + model.value_dim) * seq
    if convention == "causal":
        return 3 * forward_flops(model, seq)
    if convention == "full-attention":
        return 3 * forward_flops(model, seq, halve_causal=False)
    if convention == "6nd":
        return 6 * active_parameter_count(model)
    if convention == "palm":
        return 6 * active_parameter_count(model) + attention
    if convention == "torchtitan":
        return 6 * (active_parameter_count(model) - embedding_parameters(model)) + attention
    raise AssertionError(f"unknown convention {convention}")


def _tuned_share(model: Model, seq: int, tuning: Tuning) -> float:
    """FLOPs of fine-tuning, as a share of those of training everything."""
    first = tuning.first_trained(model)
    layers = model.layers + model.mtp_layers
    forward, weights = forward_flops(model, seq), 0.0
    inputs = (
        0.0 if first is None else (1 - max(0, first) / layers) * _layers_forward_flops(model, seq, halve_causal=True)
    )
    head = forward - _layers_forward_flops(model, seq, halve_causal=True)
    if first is not None or tuning.trains("norms"):
        inputs += head
    if tuning.trains("head"):
        weights += head
    for layer in range(layers):
        kind = model.every_layer[layer]
        moe, trained = model.experts_of(kind), tuned_layer(model, tuning, (layer,), kind).trained
        active = moe.top_k / moe.experts if moe else 1.0
        weights += 2 * (trained.dense - trained.norms + trained.experts * active)
    bare = replace(tuning, adapters=None) if tuning.patterns else NOTHING
    adapters = trained_parameters(model, tuning) - trained_parameters(model, bare)
    own = 4 * adapters if tuning.adapters else 0  # their forward pass and the gradient of their inputs
    return (forward + inputs + weights + own) / (3 * forward)


def _dense_mlp_inputs_flops(model: Model) -> float:
    """The up and gate matmuls of dense layers and shared experts."""
    widths = (model.layers - model.moe_layers) * model.ffn + (
        model.moe_layers * model.moe.shared_ffn if model.moe else 0
    )
    return 2.0 * model.hidden * widths * (2 if model.gated else 1)


def recomputed_flops_per_token(model: Model, seq: int, recompute: str, operators: tuple[str, ...]) -> float:
    """Forward FLOPs per token that recompute runs again; element-wise operators are not counted."""
    if recompute == "full":
        return _layers_forward_flops(model, seq, halve_causal=True)
    if recompute != "selective":
        return 0.0
    again = 0.0
    if "attention" in operators:
        again += sum(count * layer_forward_flops(model, seq, kind).attention for kind, count in _all_layers(model))
    if "mlp-up" in operators:
        again += _dense_mlp_inputs_flops(model)
    return again
