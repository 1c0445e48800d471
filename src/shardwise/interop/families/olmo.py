"""OLMo."""

from __future__ import annotations

from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU, WINDOW
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, EXPERTS, MLP, OUT_NORMS, stored_as
from shardwise.spec.model import Model


def _olmo_3_layers(model: Model) -> dict[str, Any]:
    """Rotary positions are stretched in layers without a window only."""
    scaling = keys.write_scaling(model.numerics.rope_scaling, model) or {"rope_type": "default"}
    windowed = {"rope_type": "default", "rope_theta": model.numerics.windowed_rope_theta}
    rotary = {keys.GLOBAL: {**scaling, "rope_theta": model.numerics.rope_theta}, keys.WINDOWED: windowed}
    return {"rope_parameters": rotary, **keys.layer_types(model)}


# fmt: off
_OLMO_KEYS = with_defaults({**GROUPED, **SILU, **BIAS, **NUMERICS}, vocab=50304)
_OLMO = Family(
    "olmo",
    {
        **{field: key for field, key in _OLMO_KEYS.items() if field != "numerics.norm_epsilon"},
        "numerics.clip_qkv": key("clip_qkv", None),
    },
    {"norm": "layernorm", "norm_weight": False, "positions": "rope", "numerics.norm_epsilon": 1e-5},
    tensors=stored_as("OlmoForCausalLM", ATTENTION, MLP),
)
_OLMO_2 = Family(
    "olmo2",
    with_defaults(_OLMO_KEYS, **{"numerics.norm_epsilon": 1e-5}),
    {**RMS, "norm_after": True, "qk_norm": True, "qk_norm_whole": True},
    tensors=stored_as("Olmo2ForCausalLM", ATTENTION, MLP, OUT_NORMS),
)
_OLMO_3 = Family(
    "olmo3",
    with_defaults(
        {
            **_OLMO_KEYS, **WINDOW,
            "numerics.rope_theta": key("rope_theta", 5e5, read=keys.rotary("rope_theta", keys.GLOBAL)),
            "numerics.rope_scaling": keys.rope_scaling(keys.GLOBAL),
            "numerics.windowed_rope_theta": key("rope_theta", 5e5, read=keys.read_windowed_theta),
        },
        sliding_window=4096, **{"numerics.norm_epsilon": 1e-5},
    ),
    {**RMS, "norm_after": True, "qk_norm": True, "qk_norm_whole": True},
    also=_olmo_3_layers,
    tensors=stored_as("Olmo3ForCausalLM", ATTENTION, MLP, OUT_NORMS),
    layers=lambda config, layers: keys.listed_layers(config, layers, keys.usual_every(4)),
)

_OLMOE = Family(
    "olmoe",
    with_defaults(
        {
            **_OLMO_KEYS,
            "numerics.clip_qkv": key("clip_qkv", None),
            "moe.experts": key("num_experts|num_local_experts", 64),
            "moe.top_k": key("num_experts_per_tok", 8),
            "moe.ffn": key("intermediate_size", 2048),
            "numerics.renormalise_top_k": key("norm_topk_prob", False),
        },
        layers=16, hidden=2048, heads=16, ffn=2048, max_seq=4096, **{"numerics.norm_epsilon": 1e-5},
    ),
    {**RMS, "qk_norm": True, "qk_norm_whole": True},
    tensors=stored_as("OlmoeForCausalLM", ATTENTION, EXPERTS),
)

FAMILIES = (_OLMO, _OLMO_2, _OLMO_3, _OLMOE)
# fmt: on
