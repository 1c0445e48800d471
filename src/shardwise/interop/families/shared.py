"""Keys of a ``config.json`` that many families share, with the defaults of Llama."""

from __future__ import annotations

from shardwise.interop import keys
from shardwise.interop.keys import GATED, activation, key

# fmt: off
SHAPE = {
    "layers": key("num_hidden_layers", 32),
    "hidden": key("hidden_size", 4096),
    "heads": key("num_attention_heads", 32),
    "ffn": key("intermediate_size", 11008),
    "vocab": key("vocab_size", 32000),
    "max_seq": key("max_position_embeddings", 2048),
    "tied_embeddings": key("tie_word_embeddings", False),
}
KV_HEADS = {"kv_heads": key("num_key_value_heads", None, nullable=True)}
GROUPED = {**SHAPE, **KV_HEADS, "head_dim": key("head_dim", None, nullable=True)}
SILU = activation("hidden_act", "silu", GATED)
BIAS = {"qkv_bias": key("attention_bias", False), "attention_out_bias": key("attention_bias", False)}
WINDOW = {"sliding_window": key("sliding_window", None)}
NUMERICS = {
    "numerics.norm_epsilon": key("rms_norm_eps", 1e-6),
    "numerics.rope_theta": key("rope_theta", 10_000.0, read=keys.rotary("rope_theta")),
    "numerics.rope_scaling": keys.rope_scaling(),
}
ROTARY_SHARE = {"numerics.rotary_share": key("partial_rotary_factor", 1.0, read=keys.rotary("partial_rotary_factor"))}
RMS = {"norm": "rmsnorm", "positions": "rope"}
LAYER_NORM = {"norm": "layernorm", "positions": "learned"}
BIASED = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
# fmt: on
