"""StableLM and StarCoder2: layer norms beside rope."""

from __future__ import annotations

from shardwise.interop.families.shared import KV_HEADS, NUMERICS, ROTARY_SHARE, SHAPE, SILU, WINDOW
from shardwise.interop.keys import PLAIN, Family, activation, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as

# fmt: off
_KEYS = {**SHAPE, **KV_HEADS, **NUMERICS}
_STABLELM = Family(
    "stablelm",
    with_defaults(
        {
            **_KEYS, **SILU, **ROTARY_SHARE,
            "numerics.norm_epsilon": key("layer_norm_eps", 1e-5),
            "qkv_bias": key("use_qkv_bias", False),
            "parallel_block": key("use_parallel_residual", False),
            "norms_per_layer": key(
                "use_parallel_residual", False,
                read=lambda value, config: 1 if value is True else 2,
                write=lambda value, model: model.parallel_block,
            ),
        },
        hidden=2560, kv_heads=32, ffn=6912, vocab=50304, max_seq=4096, **{"numerics.rotary_share": 0.25},
    ),
    {"norm": "layernorm", "positions": "rope"},
    {"qk_layernorm": False},
    tensors=stored_as("StableLmForCausalLM", ATTENTION, MLP),
)
_STARCODER_2 = Family(
    "starcoder2",
    with_defaults(
        {
            **_KEYS, **WINDOW, **activation("hidden_act", "gelu_pytorch_tanh", PLAIN),
            "numerics.norm_epsilon": key("norm_epsilon", 1e-5),
            **{field: key("use_bias", True) for field in ("qkv_bias", "attention_out_bias", "mlp_bias")},
        },
        layers=30, hidden=3072, heads=24, kv_heads=2, ffn=12288, vocab=49152, max_seq=4096, tied_embeddings=True,
    ),
    {"norm": "layernorm", "positions": "rope"},
    tensors=stored_as("Starcoder2ForCausalLM", ATTENTION, {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
)

FAMILIES = (_STABLELM, _STARCODER_2)
# fmt: on
