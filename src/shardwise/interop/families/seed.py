"""Seed-OSS."""

from __future__ import annotations

from shardwise.interop.families.shared import GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as

# fmt: off
_SEED_OSS = Family(
    "seed_oss",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            "qkv_bias": key("attention_bias", True),
            "attention_out_bias": key("attention_out_bias", False),
            "mlp_bias": key("mlp_bias", False),
        },
        layers=64, heads=80, kv_heads=8, head_dim=128, ffn=27648, vocab=155136, max_seq=524288,
    ),
    RMS,
    tensors=stored_as("SeedOssForCausalLM", ATTENTION, MLP),
)

FAMILIES = (_SEED_OSS,)
# fmt: on
