"""GLM-4, its version 0414 with norms on both sides, and the mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop.families.deepseek import BALANCED, BALANCED_KEYS, BALANCED_NAMES, PREDICTION
from shardwise.interop.families.shared import GROUPED, NUMERICS, RMS, ROTARY_SHARE, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, QUERY_AND_KEY, stored_as


def _head_size(value: Any, config: Config) -> Any:
    """Not a divisor of the hidden size in the library's own defaults."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    return hidden // heads if value is None and whole else value


# fmt: off
_JOINED_MLP = {**dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"), "mlp.down": "mlp.down_proj"}
_GLM_NAMES = replace(
    stored_as("GlmForCausalLM", ATTENTION, _JOINED_MLP, interleaved=QUERY_AND_KEY), fused=(("mlp.gate", "mlp.up"),)
)
_GLM = Family(
    "glm",
    with_defaults(
        {**GROUPED, **SILU, **NUMERICS, **ROTARY_SHARE, "qkv_bias": key("attention_bias", True)},
        layers=40, kv_heads=2, head_dim=128, ffn=13696, vocab=151552, max_seq=131072,
        **{"numerics.norm_epsilon": 1.5625e-7, "numerics.rotary_share": 0.5},
    ),
    RMS,
    tensors=_GLM_NAMES,
)
_GLM_4 = Family(
    "glm4",
    _GLM.keys,
    {**RMS, "norms_per_layer": 4},
    tensors=replace(
        _GLM_NAMES,
        architecture="Glm4ForCausalLM",
        inside={
            **_GLM_NAMES.inside,
            "attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm",
        },
    ),
)
_GLM_4_MOE = Family(
    "glm4_moe",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS, **ROTARY_SHARE, **BALANCED_KEYS,
            "head_dim": key("head_dim", None, nullable=True, read=_head_size),
            "qkv_bias": key("attention_bias", False),
            "qk_norm": key("use_qk_norm", False),
            "mtp_layers": key("num_nextn_predict_layers|num_mtp_layers", 1),
        },
        layers=46, heads=96, kv_heads=8, ffn=10944, vocab=151552, max_seq=131072,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rotary_share": 0.5, "moe.experts": 128, "moe.top_k": 8,
           "moe.ffn": 1408, "moe.shared_ffn": 1, "moe.dense_layers": 1, "numerics.renormalise_top_k": True},
    ),
    {**RMS, **BALANCED},
    tensors=stored_as("Glm4MoeForCausalLM", ATTENTION, BALANCED_NAMES, PREDICTION),
)

FAMILIES = (_GLM, _GLM_4, _GLM_4_MOE)
# fmt: on
