"""Ernie 4.5 and Helium: Llama with the two members of each rotated pair side by side."""

from __future__ import annotations

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, QUERY_AND_KEY, stored_as

# fmt: off
_ERNIE = Family(
    "ernie4_5",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            **{field: key("use_bias", False) for field in ("qkv_bias", "attention_out_bias", "mlp_bias")},
        },
        layers=18, hidden=1024, heads=16, kv_heads=2, head_dim=128, ffn=3072, vocab=103424, max_seq=131072,
        tied_embeddings=True, **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 5e5},
    ),
    RMS,
    tensors=stored_as("Ernie4_5ForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
)
_HELIUM = Family(
    "helium",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            "qkv_bias": BIAS["qkv_bias"],
            "mlp_bias": key("mlp_bias", False),
        },
        layers=24, hidden=2560, heads=20, kv_heads=20, head_dim=128, ffn=7040, vocab=48000, max_seq=4096,
        **{"numerics.norm_epsilon": 1e-8, "numerics.rope_theta": 1e5},
    ),
    RMS,
    {"head_dim": lambda config: config["hidden_size"] // max(1, config["num_attention_heads"])},
    tensors=stored_as("HeliumForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
)

FAMILIES = (_ERNIE, _HELIUM)
# fmt: on
