"""gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from shardwise.interop import keys
from shardwise.interop.families.shared import (
    BIAS,
    GROUPED,
    NUMERICS,
    RMS,
    SILU,
)
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, JoinedExperts, joined_experts_in, stored_as

# fmt: off
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = Family(
    "gpt_oss",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **NUMERICS,
            "numerics.rope_scaling": keys.rope_scaling(usual=_GPT_OSS_SCALING),
            "sliding_window": key("sliding_window", 128, nullable=True),
            "numerics.swiglu_limit": key("swiglu_limit", 7.0),
            "numerics.swiglu_alpha": key("swiglu_alpha", 1.702),
            "moe.experts": key("num_local_experts", 128),
            "moe.top_k": key("num_experts_per_tok|experts_per_token", 4),
            "moe.ffn": key("intermediate_size", 2880),
        },
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088, max_seq=131072,
        qkv_bias=True, attention_out_bias=True,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 150_000.0},
    ),
    {**RMS, "mlp_bias": True, "attention_sinks": True, "moe.router_logit_bias": True, "sliding_window_every": 2},
    also=keys.layer_types,
    layers=keys.listed_layers_or_usual,
    tensors=replace(
        stored_as(
            "GptOssForCausalLM",
            ATTENTION, joined_experts_in("mlp.experts"),
            {"attention.sinks": "self_attn.sinks", "mlp.router.gate": "mlp.router"},
        ),
        joined_experts=JoinedExperts(transposed=True, alternating=True),
    ),
)

FAMILIES = (_GPT_OSS,)
# fmt: on
