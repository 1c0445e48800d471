"""The GPT line: layer norms and biases, in the older config style."""

from __future__ import annotations

from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, BIASED, LAYER_NORM, NUMERICS, SHAPE
from shardwise.interop.keys import PLAIN, Config, Family, activation, key, with_defaults
from shardwise.interop.tensor_names import FREQUENCIES, QUERY_KEY_VALUE, TensorNames
from shardwise.spec.model import Model


def _falcon_norms(value: Any, config: Config) -> Any:
    if config.get("new_decoder_architecture", False):
        return 2 if value is None else value
    return 1 if config["parallel_attn"] else 2


def _falcon_kv_heads(value: Any, config: Config) -> Any:
    if config.get("new_decoder_architecture", False):
        return value
    return 1 if config.get("multi_query", True) else None


def _falcon_switches(model: Model) -> dict[str, Any]:
    grouped = model.kv_heads not in (1, model.heads) or (model.parallel_block and model.norms_per_layer == 2)
    return {"new_decoder_architecture": grouped, "multi_query": model.kv_heads == 1}


# fmt: off
_GPT_2_NAMES = TensorNames(
    "GPT2LMHeadModel",
    {
        "attention_norm": "ln_1",
        **dict.fromkeys(QUERY_KEY_VALUE, "attn.c_attn"),
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer="transformer.h.{}.",
    transposed=frozenset({*QUERY_KEY_VALUE, "attention.output", "mlp.up", "mlp.down"}),
    fused=(QUERY_KEY_VALUE,),
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias"),
)
_GPT_NEOX_NAMES = TensorNames(
    "GPTNeoXForCausalLM",
    {
        "attention_norm": "input_layernorm",
        **dict.fromkeys(QUERY_KEY_VALUE, "attention.query_key_value"),
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    layer="gpt_neox.layers.{}.",
    fused=(QUERY_KEY_VALUE,),
    by_head=True,
    prefix="gpt_neox.",
    ignored=("attention.bias", "attention.masked_bias", *FREQUENCIES),
)
_GPT_2 = Family(
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
    tensors=_GPT_2_NAMES,
)
_GPT_NEOX = Family(
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
    tensors=_GPT_NEOX_NAMES,
)
_OPT = Family(
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
_FALCON = Family(
    "falcon",
    {
        "layers": key("num_hidden_layers|n_layer", 32),
        "hidden": key("hidden_size|n_embed", 4544),
        "heads": key("num_attention_heads|n_head", 71),
        "kv_heads": key("num_kv_heads|n_head_kv", None, read=_falcon_kv_heads),
        "ffn": key("ffn_hidden_size", None, read=keys.four_times("hidden_size")),
        "vocab": key("vocab_size", 65024),
        "max_seq": key("max_position_embeddings", 2048),
        "tied_embeddings": key("tie_word_embeddings", True),
        **activation("activation", "gelu", PLAIN),
        "qkv_bias": key("bias", False),
        "attention_out_bias": key("bias", False),
        "mlp_bias": key("bias", False),
        "norms_per_layer": key("num_ln_in_parallel_attn", None, read=_falcon_norms),
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
    also=_falcon_switches,
)

FAMILIES = (_GPT_2, _GPT_NEOX, _OPT, _FALCON)
# fmt: on
