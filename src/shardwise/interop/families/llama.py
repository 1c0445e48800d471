"""Llama, Mistral and Mixtral, Ministral, and Meta's code world model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU, WINDOW
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, experts_in, stored_as
from shardwise.spec.model import Model


def _growing(name: str) -> Callable[[Any, Config], Any]:
    """A reader of what Ministral 3 keeps among its rotary parameters: how queries grow along a sequence."""

    def read(value: Any, config: Config) -> Any:
        given = config.get("rope_parameters") or config["rope_scaling"]
        return given.get(name) if isinstance(given, Mapping) else None

    return read


def _write_growing(value: Any, model: Model) -> dict[str, Any]:
    numerics = model.numerics
    written = keys.write_scaling(numerics.rope_scaling, model) or {"rope_type": "default"}
    grown = {"llama_4_scaling_beta": numerics.long_query_scale}
    return {**written, "original_max_position_embeddings": numerics.long_query_floor, **grown}


# fmt: off
_LLAMA = Family(
    "llama", {**GROUPED, **SILU, **BIAS, **NUMERICS, "mlp_bias": key("mlp_bias", False)}, RMS,
    tensors=stored_as("LlamaForCausalLM", ATTENTION, MLP),
)

_MISTRAL_KEYS = with_defaults({**GROUPED, **SILU, **WINDOW, **NUMERICS}, ffn=14336, max_seq=131072, kv_heads=8)
_MISTRAL = Family(
    "mistral", with_defaults(_MISTRAL_KEYS, sliding_window=4096), RMS,
    tensors=stored_as("MistralForCausalLM", ATTENTION, MLP),
)
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
    tensors=stored_as("MixtralForCausalLM", ATTENTION, experts_in("block_sparse_moe", "w1", "w3", "w2")),
)
_MINISTRAL = Family(
    "ministral",
    {**_MISTRAL_KEYS, "sliding_window": key("sliding_window", 4096, nullable=True)},
    RMS,
    also=keys.layer_types,
    tensors=stored_as("MinistralForCausalLM", ATTENTION, MLP),
    layers=keys.listed_layers_or_usual,
)
_MINISTRAL_3_SCALING = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}
_MINISTRAL_3_ROPE = replace(keys.rope_scaling(usual=_MINISTRAL_3_SCALING), write=_write_growing)
_MINISTRAL_3 = Family(
    "ministral3",
    with_defaults(
        {
            **GROUPED, **SILU, **WINDOW, **NUMERICS,
            "numerics.rope_scaling": _MINISTRAL_3_ROPE,
            "numerics.long_query_scale": replace(_MINISTRAL_3_ROPE, read=_growing("llama_4_scaling_beta")),
            "numerics.long_query_floor": key(
                "max_position_embeddings", 262144,
                read=_growing("original_max_position_embeddings"), write=lambda value, model: model.max_seq,
            ),
        },
        layers=34, kv_heads=8, head_dim=128, ffn=14336, vocab=131072, max_seq=262144,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 1e6},
    ),
    {**RMS, "numerics.long_query_layers": "with-rope"},
    tensors=stored_as("Ministral3ForCausalLM", ATTENTION, MLP),
)
_LLAMA_3_SCALING = {
    "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_CWM = Family(
    "cwm",
    with_defaults(
        {
            **GROUPED, **SILU, **WINDOW, **NUMERICS,
            "numerics.rope_scaling": keys.rope_scaling(usual=_LLAMA_3_SCALING),
            "mlp_bias": key("mlp_bias", False),
        },
        layers=64, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=21504, vocab=128256, max_seq=131072,
        sliding_window=8192, **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 1e6},
    ),
    RMS,
    also=keys.layer_types,
    tensors=stored_as("CwmForCausalLM", ATTENTION, MLP),
    layers=lambda config, layers: keys.listed_layers(
        config, layers, lambda index: keys.WINDOWED if index % 4 else keys.GLOBAL
    ),
)

FAMILIES = (_LLAMA, _MISTRAL, _MIXTRAL, _MINISTRAL, _MINISTRAL_3, _CWM)
# fmt: on
