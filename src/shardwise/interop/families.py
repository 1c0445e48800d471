"""The model families of Hugging Face: where each `Model` field stands in their ``config.json``.

One table per ``model_type``. A field that the family always has the same way is ``fixed``; every other names
its key and the value the `transformers` library takes when the key is absent.
"""

from __future__ import annotations

from shardwise.interop import rope, translate
from shardwise.interop.gpt_families import FALCON, GPT_2, GPT_NEOX, GPT_OSS, OPT, PHI
from shardwise.interop.keys import GATED, LIST, MAPPING, TEXT, Family, activation, key, with_defaults
from shardwise.interop.shared_keys import BIAS, GROUPED, KV_HEADS, NUMERICS, RMS, ROTARY_SHARE, SHAPE, SILU, WINDOW

# fmt: off
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
    also=translate.phi_3_lengths,
)

# -- OLMo --------------------------------------------------------------------------------------------------

_OLMO_KEYS = with_defaults({**GROUPED, **SILU, **BIAS, **NUMERICS}, vocab=50304)
_OLMO = Family(
    "olmo",
    {
        **{field: one for field, one in _OLMO_KEYS.items() if field != "numerics.norm_epsilon"},
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
_QWEN_2 = Family("qwen2", _QWEN, {**RMS, "qkv_bias": True}, also=translate.qwen_window_switch)
_QWEN_3 = Family(
    "qwen3",
    with_defaults({**_QWEN, **BIAS}, head_dim=128),
    {**RMS, "qk_norm": True},
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
    {**RMS, "moe.shared_gate": True},
    {"use_sliding_window": False},  # transformers gives this family's window to other layers than its siblings'
    also=translate.qwen_window_switch,
)
_QWEN_3_MOE = Family(
    "qwen3_moe",
    with_defaults(
        {**_QWEN, **BIAS, **_QWEN_EXPERTS},
        layers=24, hidden=2048, heads=32, kv_heads=4, ffn=6144,
        **{"moe.experts": 128, "moe.top_k": 8, "moe.ffn": 768},
    ),
    {**RMS, "qk_norm": True},
    also=translate.qwen_window_switch,
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
_DEEPSEEK_V2 = Family("deepseek_v2", _DEEPSEEK, RMS, {**_DEEPSEEK_REQUIRES, "scoring_func": "softmax"})
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
        "numerics.embedding_scale": key("hidden_size", 3072, read=translate.root, write=translate.width),
    },
    layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000, max_seq=8192,
    tied_embeddings=True,
)
_GEMMA_2_KEYS = with_defaults(
    {
        **_GEMMA_KEYS, **WINDOW,
        "numerics.attention_scalar": key("query_pre_attn_scalar", 256, write=translate.whole),
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
            "sliding_window": key("sliding_window", 4096, nullable=True, read=translate.second_window),
            "numerics.attention_softcap": key("attn_logit_softcapping", 50.0, nullable=True),
        },
        **{"numerics.logit_softcap": 30.0},
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "sliding_window_every": 2},
    _ONE_DIRECTION,
    also=translate.layer_kinds,
)
_GEMMA_3 = Family(
    "gemma3_text",
    with_defaults(
        {
            **_GEMMA_2_KEYS,
            "sliding_window_every": key(
                "sliding_window_pattern|_sliding_window_pattern", 6, read=translate.window_every
            ),
            "numerics.rope_theta": key("rope_theta", 1e6, read=rope.read_global_theta),
            "numerics.rope_scaling": key(
                "rope_scaling", None, holds=MAPPING, read=rope.read_global_scaling, write=rope.write_scaling
            ),
            "numerics.windowed_rope_theta": key("rope_local_base_freq", 10_000.0, read=rope.read_windowed_theta),
        },
        vocab=262208, max_seq=131072,
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "qk_norm": True},
    {**_ONE_DIRECTION, "attn_logit_softcapping": None},
    also=translate.layer_kinds,
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
