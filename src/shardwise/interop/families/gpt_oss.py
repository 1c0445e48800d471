"""gpt-oss."""

from __future__ import annotations

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU, WINDOW
from shardwise.interop.keys import Family, key, with_defaults

# fmt: off
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = Family(
    "gpt_oss",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **WINDOW, **NUMERICS,
            "moe.experts": key("num_local_experts", 128),
            "moe.top_k": key("num_experts_per_tok|experts_per_token", 4),
            "moe.ffn": key("intermediate_size", 2880),
        },
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088, max_seq=131072,
        qkv_bias=True, attention_out_bias=True, sliding_window=128,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 150_000.0, "numerics.rope_scaling": _GPT_OSS_SCALING},
    ),
    {**RMS, "mlp_bias": True, "moe.router_bias": True, "sliding_window_every": 2},
)

FAMILIES = (_GPT_OSS,)
# fmt: on
