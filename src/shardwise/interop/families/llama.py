"""Llama, Mistral and Mixtral."""

from __future__ import annotations

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

FAMILIES = (_LLAMA, _MISTRAL, _MIXTRAL)
# fmt: on
