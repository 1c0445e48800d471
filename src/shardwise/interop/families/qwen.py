"""Qwen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, ROTARY_SHARE, SILU
from shardwise.interop.keys import (
    GLOBAL,
    LINEAR,
    LIST,
    WINDOWED,
    WITH_DELTA_NETS,
    Config,
    Family,
    key,
    layer_types,
    listed_layers,
    usual_every,
    with_defaults,
)
from shardwise.interop.tensor_names import ATTENTION, EXPERTS, MLP, shared_in, stored_as
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model


def _leading_layers(value: Any, config: Config) -> int:
    """Qwen's list of dense layers as a number of leading ones."""
    layers = list(value or ())
    if layers != list(range(len(layers))) or (layers and config.get("decoder_sparse_step", 1) != 1):
        raise SpecError("mlp_only_layers", f"{shown(value)} are not the first layers", "only the first may be dense")
    return len(layers)


def _first_dense(value: int, model: Model) -> list[int]:
    """The first layers without experts of a model, which its pattern says if it has one."""
    if not model.pattern:
        return list(range(value))
    return list(takewhile(lambda index: not model.is_moe_layer(index), range(model.layers)))


def _qwen_window(value: Any, config: Config) -> Any:
    """Qwen's window applies only if switched on."""
    if not config.get("use_sliding_window", False):
        return None
    return value


def _layers(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    """``layer_types``, or a window from layer ``max_window_layers`` on."""
    if layers[0].mixer == "full":  # no window, or switched off
        return layers
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise SpecError(
            "max_window_layers", f"{shown(first)} is not a whole number", "correct that value of the config"
        )
    return listed_layers(config, layers, lambda index: WINDOWED if index >= first else GLOBAL)


def _qwen_windows(model: Model) -> dict[str, Any]:
    windowed = [index for index in range(model.layers) if model.every_layer[index].mixer == "window"]
    if not windowed:
        return {}
    return {"use_sliding_window": True, "max_window_layers": windowed[0], **layer_types(model)}


def _layers_with_delta_nets(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    usual = usual_every(config.get("full_attention_interval", 4), LINEAR)
    return listed_layers(config, layers, usual, WITH_DELTA_NETS)


# fmt: off
_QWEN = with_defaults(
    {
        **GROUPED, **SILU, **NUMERICS,
        "sliding_window": key("sliding_window", 4096, nullable=True, read=_qwen_window),
    },
    ffn=22016, vocab=151936, max_seq=32768, kv_heads=32,
)
_QWEN_EXPERTS = {
    "moe.experts": key("num_experts|num_local_experts", 60),
    "moe.top_k": key("num_experts_per_tok", 4),
    "moe.ffn": key("moe_intermediate_size", 1408),
    "moe.every": key("decoder_sparse_step", 1),
    "numerics.renormalise_top_k": key("norm_topk_prob", False),
    "moe.dense_layers": key(
        "mlp_only_layers", None, types=LIST, read=_leading_layers, write=_first_dense
    ),
}
_QWEN_2 = Family(
    "qwen2", _QWEN, {**RMS, "qkv_bias": True},
    also=_qwen_windows, layers=_layers,
    tensors=stored_as("Qwen2ForCausalLM", ATTENTION, MLP),
)
_QWEN_3 = Family(
    "qwen3",
    with_defaults({**_QWEN, **BIAS}, head_dim=128),
    {**RMS, "qk_norm": True},
    also=_qwen_windows, layers=_layers,
    tensors=stored_as("Qwen3ForCausalLM", ATTENTION, MLP),
)
_QWEN_2_MOE = Family(
    "qwen2_moe",
    with_defaults(
        {
            **_QWEN, **_QWEN_EXPERTS,
            "qkv_bias": key("qkv_bias", True),
            "moe.shared_ffn": key("shared_expert_intermediate_size", 5632),
        },
        layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5632,
    ),
    {**RMS, "moe.shared_gate": True},
    {"use_sliding_window": False},  # transformers gives this family's window to other layers than its siblings'
    also=_qwen_windows, layers=_layers,
    tensors=stored_as(
        "Qwen2MoeForCausalLM",
        ATTENTION, MLP, EXPERTS, shared_in("shared_expert"), {"mlp.shared_gate": "mlp.shared_expert_gate"},
    ),
)
_QWEN_3_MOE = Family(
    "qwen3_moe",
    with_defaults(
        {**_QWEN, **BIAS, **_QWEN_EXPERTS},
        layers=24, hidden=2048, heads=32, kv_heads=4, ffn=6144,
        **{"moe.experts": 128, "moe.top_k": 8, "moe.ffn": 768},
    ),
    {**RMS, "qk_norm": True},
    also=_qwen_windows, layers=_layers,
    tensors=stored_as("Qwen3MoeForCausalLM", ATTENTION, MLP, EXPERTS),
)

_QWEN_3_VL_MOE = Family(  # positions in pictures are those of text as long as there are none
    "qwen3_vl_moe_text",
    with_defaults(
        {**GROUPED, **SILU, **BIAS, **NUMERICS, **_QWEN_EXPERTS},
        layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5632, vocab=151936, max_seq=128000, tied_embeddings=True,
        **{"numerics.rope_theta": 500_000.0, "numerics.renormalise_top_k": True},
    ),
    {**RMS, "qk_norm": True},
)

# The language models of those that read pictures; Qwen2-VL's older configs have its keys beside the others.
_QWEN_2_VL = [
    Family(
        name,
        with_defaults(
            _QWEN,
            layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568, vocab=152064,
            **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 1e6},
        ),
        {**RMS, "qkv_bias": True},
        also=_qwen_windows, layers=_layers,
    )
    for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl")
]
_QWEN_3_VL = Family(
    "qwen3_vl_text",
    with_defaults(
        {**GROUPED, **SILU, **BIAS, **NUMERICS},
        head_dim=128, kv_heads=32, ffn=22016, vocab=151936, max_seq=128000, **{"numerics.rope_theta": 5e5},
    ),
    {**RMS, "qk_norm": True},
)

_DELTA_NETS = with_defaults(
    {
        **GROUPED, **SILU, **BIAS, **NUMERICS, **ROTARY_SHARE,
        "delta.key_heads": key("linear_num_key_heads", 16),
        "delta.value_heads": key("linear_num_value_heads", 32),
        "delta.key_dim": key("linear_key_head_dim", 128),
        "delta.value_dim": key("linear_value_head_dim", 128),
        "delta.convolved_tokens": key("linear_conv_kernel_dim", 4),
    },
    hidden=2048, heads=16, kv_heads=2, head_dim=256, max_seq=32768, **{"numerics.rotary_share": 0.25},
)
_WITH_DELTA_NETS = {**RMS, "qk_norm": True, "attention_gate": True, "numerics.norm_plus_one": True}
_SHARED_EXPERT = {"moe.shared_ffn": key("shared_expert_intermediate_size", 512)}
_QWEN_3_NEXT = Family(
    "qwen3_next",
    with_defaults(
        {**_DELTA_NETS, **{name: one for name, one in _QWEN_EXPERTS.items() if name != "moe.every"}, **_SHARED_EXPERT},
        layers=48, ffn=5632, vocab=151936,
        **{"moe.experts": 512, "moe.top_k": 10, "moe.ffn": 512, "numerics.renormalise_top_k": True},
    ),
    {**_WITH_DELTA_NETS, "moe.shared_gate": True},
    {"decoder_sparse_step": 1},
    also=layer_types, layers=_layers_with_delta_nets,
)
_QWEN_3_5 = Family(
    "qwen3_5_text",
    with_defaults(_DELTA_NETS, hidden=4096, kv_heads=4, ffn=12288, vocab=248320),
    _WITH_DELTA_NETS,
    also=layer_types, layers=_layers_with_delta_nets,
)
_QWEN_3_5_MOE = Family(
    "qwen3_5_moe_text",
    {
        **with_defaults(_DELTA_NETS, layers=40, vocab=248320),
        **_SHARED_EXPERT,
        "ffn": key("moe_intermediate_size", 512),  # all layers are mixtures
        "moe.experts": key("num_experts", 256),
        "moe.top_k": key("num_experts_per_tok", 8),
        "moe.ffn": key("moe_intermediate_size", 512),
    },
    {**_WITH_DELTA_NETS, "moe.shared_gate": True},
    also=layer_types, layers=_layers_with_delta_nets,
)

FAMILIES = (
    _QWEN_2, _QWEN_3, _QWEN_2_MOE, _QWEN_3_MOE, *_QWEN_2_VL, _QWEN_3_VL, _QWEN_3_VL_MOE,
    _QWEN_3_NEXT, _QWEN_3_5, _QWEN_3_5_MOE,
)
# fmt: on
