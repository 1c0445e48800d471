"""The model families of Hugging Face: where each `Model` field stands in their ``config.json``.

One table per ``model_type``. A field that the family always has the same way is ``fixed``; every other names
its key and the value the `transformers` library takes when the key is absent.
"""

from __future__ import annotations

from shardwise.interop import keys
from shardwise.interop.keys import GATED, LIST, PLAIN, TEXT, Family, activation, key, with_defaults

# -- Keys that many families share, with the defaults of Llama

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

# -- The GPT line: layer norms and biases, in the older config style -----------------------------------------

GPT_2 = Family(
    "gpt2",
    {
        "layers": key("n_layer|num_hidden_layers", 12),
        "hidden": key("n_embd|hidden_size", 768),
        "heads": key("n_head|num_attention_heads", 12),
        "ffn": key("n_inner", None, read=keys.four_times("n_embd")),
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
            "numerics.rope_theta": key("rotary_emb_base|rope_theta", 10_000.0, read=keys.rotary("rope_theta")),
            "numerics.rope_scaling": NUMERICS["numerics.rope_scaling"],
            "numerics.rotary_share": key(
                "rotary_pct|partial_rotary_factor", 0.25, read=keys.rotary("partial_rotary_factor")
            ),
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
_GPT_OSS_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Family(
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
        "kv_heads": key("num_kv_heads|n_head_kv", None, read=keys.falcon_kv_heads),
        "ffn": key("ffn_hidden_size", None, read=keys.four_times("hidden_size")),
        "vocab": key("vocab_size", 65024),
        "max_seq": key("max_position_embeddings", 2048),
        "tied_embeddings": key("tie_word_embeddings", True),
        **activation("activation", "gelu", PLAIN),
        "qkv_bias": key("bias", False),
        "attention_out_bias": key("bias", False),
        "mlp_bias": key("bias", False),
        "norms_per_layer": key("num_ln_in_parallel_attn", None, read=keys.falcon_norms),
        "parallel_block": key(
            "parallel_attn", True, read=lambda value, config: bool(config.get("new_decoder_architecture")) or value
        ),
        "positions": key(
            "alibi", False,
            read=lambda value, config: "none" if value else "rope",
            write=lambda value, model: value == "none",
        ),
    },
    {"norm": "layernorm"},
    also=keys.falcon_switches,
)

# -- Llama and Mistral -------------------------------------------------------------------------------------

_LLAMA = Family("llama", {**GROUPED, **SILU, **BIAS, **NUMERICS, "mlp_bias": key("mlp_bias", False)}, RMS)

_MISTRAL_KEYS = with_defaults({**GROUPED, **SILU, **WINDOW, **NUMERICS}, ffn=14336, max_seq=131072, kv_heads=8)
_MISTRAL = Family("mistral", with_defaults(_MISTRAL_KEYS, sliding_window=4096), RMS)
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
)
_PHI_3 = Family(
    "phi3",
    with_defaults(
        {**GROUPED, **SILU, **WINDOW, **NUMERICS, **ROTARY_SHARE},
        hidden=3072, ffn=8192, vocab=32064, max_seq=4096, **{"numerics.norm_epsilon": 1e-5},
    ),
    RMS,
    also=keys.phi_3_lengths,
)

# -- OLMo --------------------------------------------------------------------------------------------------

_OLMO_KEYS = with_defaults({**GROUPED, **SILU, **BIAS, **NUMERICS}, vocab=50304)
_OLMO = Family(
    "olmo",
    {
        **{field: key for field, key in _OLMO_KEYS.items() if field != "numerics.norm_epsilon"},
        "numerics.clip_qkv": key("clip_qkv", None),
    },
    {"norm": "layernorm", "norm_weight": False, "positions": "rope", "numerics.norm_epsilon": 1e-5},
)
_OLMO_2 = Family(
    "olmo2",
    with_defaults(_OLMO_KEYS, **{"numerics.norm_epsilon": 1e-5}),
    {**RMS, "norm_after": True, "qk_norm": True, "qk_norm_whole": True},
)

# -- Qwen --------------------------------------------------------------------------------------------------

_QWEN = with_defaults(
    {
        **GROUPED, **SILU, **NUMERICS,
        "sliding_window": key("sliding_window", 4096, nullable=True, read=keys.qwen_window),
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
        "mlp_only_layers", None, types=LIST, read=keys.leading_layers, write=lambda value, model: list(range(value))
    ),
}
_QWEN_2 = Family("qwen2", _QWEN, {**RMS, "qkv_bias": True}, also=keys.qwen_window_switch)
_QWEN_3 = Family(
    "qwen3",
    with_defaults({**_QWEN, **BIAS}, head_dim=128),
    {**RMS, "qk_norm": True},
    also=keys.qwen_window_switch,
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
    {**RMS, "moe.shared_gate": True},
    {"use_sliding_window": False},  # transformers gives this family's window to other layers than its siblings'
    also=keys.qwen_window_switch,
)
_QWEN_3_MOE = Family(
    "qwen3_moe",
    with_defaults(
        {**_QWEN, **BIAS, **_QWEN_EXPERTS},
        layers=24, hidden=2048, heads=32, kv_heads=4, ffn=6144,
        **{"moe.experts": 128, "moe.top_k": 8, "moe.ffn": 768},
    ),
    {**RMS, "qk_norm": True},
    also=keys.qwen_window_switch,
)

# -- DeepSeek: the config's head_dim is the rotary part of a head, so it is not read ------------------------

_DEEPSEEK = {
    **SHAPE, **KV_HEADS, **SILU, **NUMERICS,
    "mla.q_rank": key("q_lora_rank", 1536, nullable=True),
    "mla.kv_rank": key("kv_lora_rank", 512),
    "mla.nope_dim": key("qk_nope_head_dim", 128),
    "mla.rope_dim": key("qk_rope_head_dim", 64),
    "mla.value_dim": key("v_head_dim", 128),
    "moe.experts": key("n_routed_experts|num_local_experts", 64),
    "moe.top_k": key("num_experts_per_tok", None, nullable=False),
    "moe.ffn": key("moe_intermediate_size", 1407),
    "moe.shared_ffn": key(  # the config counts experts, `Model` takes the width of all of them together
        "n_shared_experts", 2, nullable=True,
        read=lambda value, config: (value or 0) * config["moe_intermediate_size"],
        write=lambda value, model: value // model.moe.ffn if model.moe else 0,
    ),
    "moe.dense_layers": key("first_k_dense_replace", 0),
    "moe.router": key("scoring_func", "softmax", types=TEXT),
    "numerics.router_scale": key("routed_scaling_factor", 1.0),
    "numerics.renormalise_top_k": key("norm_topk_prob", False),
    "moe.router_bias": key(  # load is balanced by a bias on the router under this name of the method
        "topk_method", "greedy", types=TEXT, read=lambda value, config: value == "noaux_tc", write=keys.routing_method
    ),
    "moe.groups": key("n_group", None, read=keys.expert_groups),
    "moe.groups_used": key("topk_group", None, read=keys.expert_groups),
}
_DEEPSEEK_REQUIRES = {"moe_layer_freq": 1, "attention_bias": False, "use_mla": True}
# transformers never normalises this family's weights of experts, whatever norm_topk_prob says.
_DEEPSEEK_V2 = Family(
    "deepseek_v2", _DEEPSEEK, RMS, {**_DEEPSEEK_REQUIRES, "scoring_func": "softmax", "norm_topk_prob": False}
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    with_defaults(
        {**_DEEPSEEK, "mtp_layers": key("num_nextn_predict_layers", 0)},
        layers=61, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, max_seq=4096,
        **{"moe.experts": 256, "moe.top_k": 8, "moe.ffn": 2048, "moe.shared_ffn": 1, "moe.dense_layers": 3,
           "moe.router": "sigmoid", "moe.router_bias": "noaux_tc", "moe.groups": 8, "moe.groups_used": 4,
           "numerics.router_scale": 2.5, "numerics.renormalise_top_k": True},
    ),
    RMS,
    {**_DEEPSEEK_REQUIRES, "scoring_func": "sigmoid"},
)

# -- Gemma -------------------------------------------------------------------------------------------------

_GEMMA_KEYS = with_defaults(
    {
        **GROUPED, **BIAS, **NUMERICS,
        **activation("hidden_activation|hidden_act", "gelu_pytorch_tanh", GATED),
        "numerics.embedding_scale": key("hidden_size", 3072, read=keys.root, write=lambda value, model: model.hidden),
    },
    layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000, max_seq=8192,
    tied_embeddings=True,
)
_GEMMA_2_KEYS = with_defaults(
    {
        **_GEMMA_KEYS, **WINDOW,
        "numerics.attention_scalar": key("query_pre_attn_scalar", 256, write=keys.integer),
        "numerics.logit_softcap": key("final_logit_softcapping", None),
    },
    layers=26, hidden=2304, heads=8, kv_heads=4, ffn=9216, sliding_window=4096, **{"numerics.embedding_scale": 2304},
)
_GEMMA_NORMS = {**RMS, "numerics.norm_plus_one": True}
_ONE_DIRECTION = {"use_bidirectional_attention": False}
_GEMMA = Family("gemma", _GEMMA_KEYS, _GEMMA_NORMS, _ONE_DIRECTION)
_GEMMA_2 = Family(
    "gemma2",
    with_defaults(
        {
            **_GEMMA_2_KEYS,
            "sliding_window": key("sliding_window", 4096, nullable=True, read=keys.second_window),
            "numerics.attention_softcap": key("attn_logit_softcapping", 50.0, nullable=True),
        },
        **{"numerics.logit_softcap": 30.0},
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "sliding_window_every": 2},
    _ONE_DIRECTION,
    also=keys.layer_kinds,
)
_GEMMA_3 = Family(
    "gemma3_text",
    with_defaults(
        {
            **_GEMMA_2_KEYS,
            "sliding_window_every": key("sliding_window_pattern|_sliding_window_pattern", 6, read=keys.listed_every),
            "numerics.rope_theta": key("rope_theta", 1e6, read=keys.rotary("rope_theta", keys.GLOBAL)),
            "numerics.rope_scaling": keys.rope_scaling(keys.GLOBAL),
            "numerics.windowed_rope_theta": key("rope_local_base_freq", 10_000.0, read=keys.read_windowed_theta),
        },
        vocab=262208, max_seq=131072,
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "qk_norm": True},
    {**_ONE_DIRECTION, "attn_logit_softcapping": None},
    also=keys.layer_kinds,
)
# fmt: on

FAMILIES = {
    family.model_type: family
    for family in (
        _LLAMA, _MISTRAL, _MIXTRAL, PHI, _PHI_3, _OLMO, _OLMO_2, _QWEN_2, _QWEN_3, _QWEN_2_MOE, _QWEN_3_MOE,
        _DEEPSEEK_V2, _DEEPSEEK_V3, _GEMMA, _GEMMA_2, _GEMMA_3, GPT_2, GPT_NEOX, GPT_OSS, OPT, FALCON,
    )
}  # fmt: skip
ALIASES = {"kimi_k2": "deepseek_v3"}
