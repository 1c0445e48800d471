"""The GPT line of Hugging Face's families: layer norms and biases, in the older ways of writing a config."""

from __future__ import annotations

from shardwise.interop import rope, translate
from shardwise.interop.keys import PLAIN, Family, activation, key, with_defaults
from shardwise.interop.shared_keys import (
    BIAS,
    BIASED,
    GROUPED,
    KV_HEADS,
    LAYER_NORM,
    NUMERICS,
    RMS,
    ROTARY_SHARE,
    SHAPE,
    SILU,
    WINDOW,
)

# fmt: off
GPT_2 = Family(
    "gpt2",
    {
        "layers": key("n_layer|num_hidden_layers", 12),
        "hidden": key("n_embd|hidden_size", 768),
        "heads": key("n_head|num_attention_heads", 12),
        "ffn": key("n_inner", None, read=translate.four_times("n_embd")),
        "vocab": key("vocab_size", 50257),
        "max_seq": key("n_positions|max_position_embeddings", 1024),
        "tied_embeddings": key("tie_word_embeddings", True),
        **activation("activation_function", "gelu_new", PLAIN),
        "numerics.norm_epsilon": key("layer_norm_epsilon", 1e-5),
    },
    {**LAYER_NORM, **BIASED},
    {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)
GPT_NEOX = Family(
    "gpt_neox",
    with_defaults(
        {
            **SHAPE, **BIAS,
            **activation("hidden_act", "gelu", PLAIN),
            "parallel_block": key("use_parallel_residual", True),
            "numerics.norm_epsilon": key("layer_norm_eps", 1e-5),
            "numerics.rope_theta": key("rotary_emb_base|rope_theta", 10_000.0, read=rope.read_theta),
            "numerics.rope_scaling": NUMERICS["numerics.rope_scaling"],
            "numerics.rotary_share": key("rotary_pct|partial_rotary_factor", 0.25, read=rope.read_share),
        },
        layers=44, hidden=6144, heads=64, ffn=24576, vocab=50432, qkv_bias=True, attention_out_bias=True,
    ),
    {"norm": "layernorm", "positions": "rope", "mlp_bias": True},
)
PHI = Family(
    "phi",
    with_defaults(
        {
            **SHAPE, **KV_HEADS, **NUMERICS, **ROTARY_SHARE,
            **activation("hidden_act", "gelu_new", PLAIN),
            "qk_norm": key("qk_layernorm", False),
            "numerics.norm_epsilon": key("layer_norm_eps", 1e-5),
        },
        layers=24, hidden=2048, ffn=8192, vocab=51200, **{"numerics.rotary_share": 0.5},
    ),
    {
        **BIASED, "norm": "layernorm", "positions": "rope", "parallel_block": True, "norms_per_layer": 1,
        "lm_head_bias": True,
    },
)
GPT_OSS = Family(
    "gpt_oss",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **WINDOW,
            "moe.experts": key("num_local_experts", 128),
            "moe.top_k": key("num_experts_per_tok|experts_per_token", 4),
            "moe.ffn": key("intermediate_size", 2880),
        },
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088, max_seq=131072,
        qkv_bias=True, attention_out_bias=True, sliding_window=128,
    ),
    {**RMS, "mlp_bias": True, "moe.router_bias": True, "sliding_window_every": 2},
)
OPT = Family(
    "opt",
    with_defaults(
        {
            **SHAPE,
            "ffn": key("ffn_dim", 3072),
            **activation("activation_function", "relu", PLAIN),
            "qkv_bias": key("enable_bias", True),
            "attention_out_bias": key("enable_bias", True),
            "mlp_bias": key("enable_bias", True),
        },
        layers=12, hidden=768, heads=12, vocab=50272, tied_embeddings=True,
    ),
    LAYER_NORM,
    {
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": lambda config: config["hidden_size"],
    },
)
FALCON = Family(
    "falcon",
    {
        "layers": key("num_hidden_layers|n_layer", 32),
        "hidden": key("hidden_size|n_embed", 4544),
        "heads": key("num_attention_heads|n_head", 71),
        "kv_heads": key("num_kv_heads|n_head_kv", None, read=translate.falcon_kv_heads),
        "ffn": key("ffn_hidden_size", None, read=translate.four_times("hidden_size")),
        "vocab": key("vocab_size", 65024),
        "max_seq": key("max_position_embeddings", 2048),
        "tied_embeddings": key("tie_word_embeddings", True),
        **activation("activation", "gelu", PLAIN),
        "qkv_bias": key("bias", False),
        "attention_out_bias": key("bias", False),
        "mlp_bias": key("bias", False),
        "norms_per_layer": key("num_ln_in_parallel_attn", None, read=translate.falcon_norms),
        "parallel_block": key("parallel_attn", True, read=translate.falcon_parallel),
        "positions": key("alibi", False, read=translate.alibi_positions, write=translate.is_alibi),
    },
    {"norm": "layernorm"},
    also=translate.falcon_switches,
)
# fmt: on
