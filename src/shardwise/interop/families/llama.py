"""Llama, Mistral and Mixtral, Ministral, and Meta's code world model."""

from __future__ import annotations

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU, WINDOW
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, experts_in, stored_as

# fmt: off
_LLAMA = Family(
    "llama", {**GROUPED, **SILU, **BIAS, **NUMERICS, "mlp_bias": key("mlp_bias", False)}, RMS,
    tensors=stored_as("LlamaForCausalLM", ATTENTION, MLP),
)

_MISTRAL_KEYS = with_defaults({**GROUPED, **SILU, **WINDOW, **NUMERICS}, ffn=14336, max_seq=131072, kv_heads=8)
_MISTRAL = Family(
    "mistral", with_defaults(_MISTRAL_KEYS, sliding_window=4096), RMS,
    tensors=stored_as("MistralForCausalLM", ATTENTION, MLP),
)
_MIXTRAL = Family(
    "mixtral",
    with_defaults(
        {
            **_MISTRAL_KEYS,
            "moe.experts": key("num_local_experts", 8),
            "moe.top_k": key("num_experts_per_tok", 2),
            "moe.ffn": key("intermediate_size", 14336),
        },
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 1e6},
    ),
    RMS,
    tensors=stored_as("MixtralForCausalLM", ATTENTION, experts_in("block_sparse_moe", "w1", "w3", "w2")),
)
_MINISTRAL = Family(
    "ministral",
    {**_MISTRAL_KEYS, "sliding_window": key("sliding_window", 4096, nullable=True)},
    RMS,
    also=keys.layer_types,
    tensors=stored_as("MinistralForCausalLM", ATTENTION, MLP),
    layers=keys.listed_layers_or_usual,
)
_LLAMA_3_SCALING = {
    "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_CWM = Family(
    "cwm",
    with_defaults(
        {
            **GROUPED, **SILU, **WINDOW, **NUMERICS,
            "numerics.rope_scaling": keys.rope_scaling(usual=_LLAMA_3_SCALING),
            "mlp_bias": key("mlp_bias", False),
        },
        layers=64, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=21504, vocab=128256, max_seq=131072,
        sliding_window=8192, **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 1e6},
    ),
    RMS,
    also=keys.layer_types,
    tensors=stored_as("CwmForCausalLM", ATTENTION, MLP),
    layers=lambda config, layers: keys.listed_layers(
        config, layers, lambda index: keys.WINDOWED if index % 4 else keys.GLOBAL
    ),
)

FAMILIES = (_LLAMA, _MISTRAL, _MIXTRAL, _MINISTRAL, _CWM)
# fmt: on
