"""Cohere's Command R: attention and MLP beside each other behind one norm, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, KV_HEADS, NUMERICS, SHAPE, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, QUERY_AND_KEY, stored_as
from shardwise.spec.layers import LayerRecord


def _cohere_2_layers(config: Config, layers: Sequence[LayerRecord]) -> list[LayerRecord]:
    """Layers without a window have no positions."""
    listed = keys.listed_layers(config, layers, keys.usual_every(config.get("sliding_window_pattern", 4)))
    return [replace(layer, rotary=layer.mixer == "window") for layer in listed]


# fmt: off
_COHERE_KEYS = with_defaults(
    {
        **SHAPE, **KV_HEADS, **SILU, **BIAS, **NUMERICS,
        "numerics.norm_epsilon": key("layer_norm_eps", 1e-5),
        "numerics.logit_scale": key("logit_scale", 0.0625),
    },
    layers=40, hidden=8192, heads=64, ffn=22528, vocab=256000, max_seq=8192, tied_embeddings=True,
)
_NORMS = {"norm": "layernorm", "norm_bias": False, "positions": "rope", "parallel_block": True, "norms_per_layer": 1}
_COHERE = Family(
    "cohere",
    with_defaults(_COHERE_KEYS, **{"numerics.rope_theta": 5e5}),
    _NORMS,
    {"use_qk_norm": False},
    tensors=stored_as("CohereForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
)
_COHERE_2 = Family(
    "cohere2",
    {**_COHERE_KEYS, "sliding_window": key("sliding_window", 4096, nullable=True)},
    _NORMS,
    {"use_qk_norm": False},
    also=keys.layer_types,
    tensors=stored_as("Cohere2ForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
    layers=_cohere_2_layers,
)

FAMILIES = (_COHERE, _COHERE_2)
# fmt: on
