"""The model families of Hugging Face: where each `Model` field stands in their ``config.json``.

One table per ``model_type``. A field that the family always has the same way is ``fixed``; every other names
its key and the value the `transformers` library takes when the key is absent.
"""

from __future__ import annotations

from shardwise.interop import rope, translate
from shardwise.interop.keys import GATED, LIST, MAPPING, PLAIN, TEXT, Family, activation, key, with_defaults

# fmt: off
_SHAPE = {
    "layers": key("num_hidden_layers", 32),
    "hidden": key("hidden_size", 4096),
    "heads": key("num_attention_heads", 32),
    "ffn": key("intermediate_size", 11008),
    "vocab": key("vocab_size", 32000),
    "max_seq": key("max_position_embeddings", 2048),
    "tied_embeddings": key("tie_word_embeddings", False),
}
_KV_HEADS = {"kv_heads": key("num_key_value_heads", None, nullable=True)}
_GROUPED = {**_SHAPE, **_KV_HEADS, "head_dim": key("head_dim", None, nullable=True)}
_SILU = activation("hidden_act", "silu", GATED)
_BIAS = {"qkv_bias": key("attention_bias", False), "attention_out_bias": key("attention_bias", False)}
_WINDOW = {"sliding_window": key("sliding_window", None)}
_NUMERICS = {
    "numerics.norm_epsilon": key("rms_norm_eps", 1e-6),
    "numerics.rope_theta": key("rope_theta", 10_000.0, read=rope.read_theta),
    "numerics.rope_scaling": key(
        "rope_scaling", None, holds=MAPPING, read=rope.read_scaling, write=rope.write_scaling
    ),
}

_RMS = {"norm": "rmsnorm", "positions": "rope"}
_LAYER_NORM = {"norm": "layernorm", "positions": "learned"}
_BIASED = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}

# -- Llama and Mistral -------------------------------------------------------------------------------------

_LLAMA = Family("llama", {**_GROUPED, **_SILU, **_BIAS, **_NUMERICS, "mlp_bias": key("mlp_bias", False)}, _RMS)

_MISTRAL_KEYS = with_defaults({**_GROUPED, **_SILU, **_WINDOW, **_NUMERICS}, ffn=14336, max_seq=131072, kv_heads=8)
_MISTRAL = Family("mistral", with_defaults(_MISTRAL_KEYS, sliding_window=4096), _RMS)
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
    _RMS,
)
_PHI_3 = Family(
    "phi3",
    with_defaults({**_GROUPED, **_SILU, **_WINDOW}, hidden=3072, ffn=8192, vocab=32064, max_seq=4096),
    _RMS,
)

# -- Qwen --------------------------------------------------------------------------------------------------

_QWEN = with_defaults(
    {
        **_GROUPED, **_SILU, **_NUMERICS,
        "sliding_window": key("sliding_window", 4096, nullable=True, read=translate.qwen_window),
    },
    ffn=22016, vocab=151936, max_seq=32768, kv_heads=32,
)
_QWEN_EXPERTS = {
    "moe.experts": key("num_experts|num_local_experts", 60),
    "moe.top_k": key("num_experts_per_tok", 4),
    "moe.ffn": key("moe_intermediate_size", 1408),
    "moe.every": key("decoder_sparse_step", 1),
    "numerics.renormalise_top_k": key("norm_topk_prob", False),
    "moe.dense_layers": key(
        "mlp_only_layers", None, holds=LIST, read=translate.leading_layers, write=translate.first_layers
    ),
}
_QWEN_2 = Family("qwen2", _QWEN, {**_RMS, "qkv_bias": True}, also=translate.qwen_window_switch)
_QWEN_3 = Family(
    "qwen3",
    with_defaults({**_QWEN, **_BIAS}, head_dim=128),
    {**_RMS, "qk_norm": True},
    also=translate.qwen_window_switch,
)
_QWEN_2_MOE = Family(
    "qwen2_moe",
    with_defaults(
        {
            **_QWEN, **_QWEN_EXPERTS,
            "qkv_bias": key("qkv_bias", True),
            "moe.shared_ffn": key("shared_expert_intermediate_size", 5632),
        },
        layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5632,
    ),
    {**_RMS, "moe.shared_gate": True},
    {"use_sliding_window": False},  # transformers gives this family's window to other layers than its siblings'
    also=translate.qwen_window_switch,
)
_QWEN_3_MOE = Family(
    "qwen3_moe",
    with_defaults(
        {**_QWEN, **_BIAS, **_QWEN_EXPERTS},
        layers=24, hidden=2048, heads=32, kv_heads=4, ffn=6144,
        **{"moe.experts": 128, "moe.top_k": 8, "moe.ffn": 768},
    ),
    {**_RMS, "qk_norm": True},
    also=translate.qwen_window_switch,
)

# -- DeepSeek: the config's head_dim is the rotary part of a head, so it is not read ------------------------

_DEEPSEEK = {
    **_SHAPE, **_KV_HEADS, **_SILU, **_NUMERICS,
    "mla.q_rank": key("q_lora_rank", 1536, nullable=True),
    "mla.kv_rank": key("kv_lora_rank", 512),
    "mla.nope_dim": key("qk_nope_head_dim", 128),
    "mla.rope_dim": key("qk_rope_head_dim", 64),
    "mla.value_dim": key("v_head_dim", 128),
    "moe.experts": key("n_routed_experts|num_local_experts", 64),
    "moe.top_k": key("num_experts_per_tok", None, nullable=False),
    "moe.ffn": key("moe_intermediate_size", 1407),
    "moe.shared_ffn": key(
        "n_shared_experts", 2, nullable=True, read=translate.shared_width, write=translate.shared_number
    ),
    "moe.dense_layers": key("first_k_dense_replace", 0),
    "moe.router": key("scoring_func", "softmax", holds=TEXT),
    "numerics.router_scale": key("routed_scaling_factor", 1.0),
    "numerics.renormalise_top_k": key("norm_topk_prob", False),
    "moe.router_bias": key(
        "topk_method", "greedy", holds=TEXT, read=translate.has_bias, write=translate.routing_method
    ),
    "moe.groups": key("n_group", None, read=translate.expert_groups),
    "moe.groups_used": key("topk_group", None, read=translate.expert_groups),
}
_DEEPSEEK_REQUIRES = {"moe_layer_freq": 1, "attention_bias": False, "use_mla": True}
_DEEPSEEK_V2 = Family("deepseek_v2", _DEEPSEEK, _RMS, {**_DEEPSEEK_REQUIRES, "scoring_func": "softmax"})
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    with_defaults(
        {**_DEEPSEEK, "mtp_layers": key("num_nextn_predict_layers", 0)},
        layers=61, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, max_seq=4096,
        **{"moe.experts": 256, "moe.top_k": 8, "moe.ffn": 2048, "moe.shared_ffn": 1, "moe.dense_layers": 3,
           "moe.router": "sigmoid", "moe.router_bias": "noaux_tc", "moe.groups": 8, "moe.groups_used": 4,
           "numerics.router_scale": 2.5, "numerics.renormalise_top_k": True},
    ),
    _RMS,
    {**_DEEPSEEK_REQUIRES, "scoring_func": "sigmoid"},
)

# -- Gemma -------------------------------------------------------------------------------------------------

_GEMMA_KEYS = with_defaults(
    {
        **_GROUPED, **_BIAS,
        **activation("hidden_activation|hidden_act", "gelu_pytorch_tanh", GATED),
    },
    layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000, max_seq=8192,
    tied_embeddings=True,
)
_GEMMA_2_KEYS = with_defaults(
    {**_GEMMA_KEYS, **_WINDOW}, layers=26, hidden=2304, heads=8, kv_heads=4, ffn=9216, sliding_window=4096
)
_GEMMA = Family("gemma", _GEMMA_KEYS, _RMS)
_GEMMA_2 = Family("gemma2", _GEMMA_2_KEYS, {**_RMS, "norms_per_layer": 4, "sliding_window_every": 2})
_GEMMA_3 = Family(
    "gemma3_text",
    with_defaults(
        {**_GEMMA_2_KEYS, "sliding_window_every": key("sliding_window_pattern|_sliding_window_pattern", 6)},
        vocab=262208, max_seq=131072,
    ),
    {**_RMS, "norms_per_layer": 4, "qk_norm": True},
)

# -- the GPT line: layer norms and biases ------------------------------------------------------------------

_GPT_2 = Family(
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
    {**_LAYER_NORM, **_BIASED},
    {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
)
_GPT_NEOX = Family(
    "gpt_neox",
    with_defaults(
        {
            **_SHAPE, **_BIAS,
            **activation("hidden_act", "gelu", PLAIN),
            "parallel_block": key("use_parallel_residual", True),
        },
        layers=44, hidden=6144, heads=64, ffn=24576, vocab=50432, qkv_bias=True, attention_out_bias=True,
    ),
    {"norm": "layernorm", "positions": "rope", "mlp_bias": True},
)
_GPT_OSS = Family(
    "gpt_oss",
    with_defaults(
        {
            **_GROUPED, **_SILU, **_BIAS, **_WINDOW,
            "moe.experts": key("num_local_experts", 128),
            "moe.top_k": key("num_experts_per_tok|experts_per_token", 4),
            "moe.ffn": key("intermediate_size", 2880),
        },
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088, max_seq=131072,
        qkv_bias=True, attention_out_bias=True, sliding_window=128,
    ),
    {**_RMS, "mlp_bias": True, "moe.router_bias": True, "sliding_window_every": 2},
)
_OPT = Family(
    "opt",
    with_defaults(
        {
            **_SHAPE,
            "ffn": key("ffn_dim", 3072),
            **activation("activation_function", "relu", PLAIN),
            "qkv_bias": key("enable_bias", True),
            "attention_out_bias": key("enable_bias", True),
            "mlp_bias": key("enable_bias", True),
        },
        layers=12, hidden=768, heads=12, vocab=50272, tied_embeddings=True,
    ),
    _LAYER_NORM,
    {
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": lambda config: config["hidden_size"],
    },
)
_FALCON = Family(
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

FAMILIES = {
    family.model_type: family
    for family in (
        _LLAMA, _MISTRAL, _MIXTRAL, _PHI_3, _QWEN_2, _QWEN_3, _QWEN_2_MOE, _QWEN_3_MOE, _DEEPSEEK_V2,
        _DEEPSEEK_V3, _GEMMA, _GEMMA_2, _GEMMA_3, _GPT_2, _GPT_NEOX, _GPT_OSS, _OPT, _FALCON,
    )
}  # fmt: skip
ALIASES = {"kimi_k2": "deepseek_v3"}
