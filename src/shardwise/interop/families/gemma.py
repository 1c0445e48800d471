"""Gemma."""

from __future__ import annotations

from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, WINDOW
from shardwise.interop.keys import GATED, Config, Family, activation, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, BOTH_NORMS, MLP, stored_as


def _root(value: Any, config: Config) -> Any:
    """Gemma multiplies embeddings by the square root of their width."""
    return float(value) ** 0.5 if 0 < value < 1e12 else 1.0  # an invalid width is rejected where it is read


# fmt: off
_GEMMA_KEYS = with_defaults(
    {
        **GROUPED, **BIAS, **NUMERICS,
        **activation("hidden_activation|hidden_act", "gelu_pytorch_tanh", GATED),
        "numerics.embedding_scale": key("hidden_size", 3072, read=_root, write=lambda value, model: model.hidden),
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
_GEMMA = Family(
    "gemma", _GEMMA_KEYS, _GEMMA_NORMS, _ONE_DIRECTION,
    tensors=stored_as("GemmaForCausalLM", ATTENTION, MLP),
)
_GEMMA_2 = Family(
    "gemma2",
    with_defaults(
        {
            **_GEMMA_2_KEYS,
            "sliding_window": key("sliding_window", 4096, nullable=True),
            "numerics.attention_softcap": key("attn_logit_softcapping", 50.0, nullable=True),
        },
        **{"numerics.logit_softcap": 30.0},
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "sliding_window_every": 2},
    _ONE_DIRECTION,
    also=keys.layer_types,
    layers=keys.listed_layers_or_usual,
    tensors=stored_as("Gemma2ForCausalLM", ATTENTION, MLP, BOTH_NORMS),
)
_GEMMA_3 = Family(
    "gemma3_text",
    with_defaults(
        {
            **_GEMMA_2_KEYS,
            "sliding_window_every": key("sliding_window_pattern|_sliding_window_pattern", 6),
            "numerics.rope_theta": key("rope_theta", 1e6, read=keys.rotary("rope_theta", keys.GLOBAL)),
            "numerics.rope_scaling": keys.rope_scaling(keys.GLOBAL),
            "numerics.windowed_rope_theta": key("rope_local_base_freq", 10_000.0, read=keys.read_windowed_theta),
        },
        vocab=262208, max_seq=131072,
    ),
    {**_GEMMA_NORMS, "norms_per_layer": 4, "qk_norm": True},
    {**_ONE_DIRECTION, "attn_logit_softcapping": None},
    also=keys.layer_types,
    layers=keys.listed_layers_or_usual,
    tensors=stored_as("Gemma3ForCausalLM", ATTENTION, MLP, BOTH_NORMS),
)

FAMILIES = (_GEMMA, _GEMMA_2, _GEMMA_3)
# fmt: on
