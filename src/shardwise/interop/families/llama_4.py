"""Llama 4: layers that see chunks take turns with layers without rope; experts read weighted inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import LIST, Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, QUERY_AND_KEY, JoinedExperts, joined_experts_in, stored_as
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model


def _layers(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    """``no_rope_layers`` (1: with rope), ``moe_layers`` and ``layer_types``, or what the library makes without them."""
    number = len(layers)
    rotary = config.get("no_rope_layers") or [
        int((index + 1) % _interval(config, "no_rope_layer_interval", 4) > 0) for index in range(number)
    ]
    if not isinstance(rotary, LIST) or len(rotary) < number or any(one not in (0, 1) for one in rotary):
        raise SpecError("no_rope_layers", f"{shown(rotary)} does not list 0 or 1 for {number} layers", "correct it")
    every = _interval(config, "interleave_moe_layer_step", 1)
    listed = config.get("moe_layers")
    mixtures = range(every - 1, number, every) if listed is None else listed
    if not isinstance(mixtures, (range, *LIST)) or any(type(one) is not int for one in mixtures):
        raise SpecError("moe_layers", f"{shown(listed)} is not a list of layers", "correct that value of the config")
    chunked = config["attention_chunk_size"] is not None
    usual = [LayerRecord(mixer="chunk" if one and chunked else "full") for one in rotary[:number]]
    mixers = keys.listed_layers(config, layers) if config.get("layer_types") is not None and chunked else usual
    return [
        LayerRecord(mixer=layer.mixer, rotary=bool(one), feed_forward="mixture" if index in mixtures else "dense")
        for index, (layer, one) in enumerate(zip(mixers, rotary))
    ]


def _interval(config: Config, name: str, usual: int) -> int:
    value = config.get(name, usual)
    if type(value) is not int or value < 1:
        raise SpecError(name, f"{shown(value)} is not a positive whole number", "correct that value of the config")
    return value


def _listed(model: Model) -> dict[str, Any]:
    layers = model.every_layer[: model.layers]
    return {
        **keys.layer_types(model),
        "no_rope_layers": [int(layer.rotary) for layer in layers],
        "moe_layers": [index for index, layer in enumerate(layers) if layer.feed_forward == "mixture"],
        "attn_temperature_tuning": model.numerics.long_query_scale is not None,
    }


def _growth(value: Any, config: Config) -> Any:
    return value if config.get("attn_temperature_tuning", True) else None


_NORMED = key("use_qk_norm", True, write=lambda value, model: model.qk_norm)

# fmt: off
_LLAMA_4 = Family(
    "llama4_text",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **NUMERICS,
            "ffn": key("intermediate_size_mlp", 16384),
            "attention_chunk": key("attention_chunk_size", 8192, nullable=True),
            "qk_norm": _NORMED,
            "qk_norm_rotated": _NORMED,
            "qk_norm_weight": replace(_NORMED, read=lambda value, config: not value),
            "numerics.long_query_scale": key("attn_scale", 0.1, read=_growth, write=lambda value, model: value or 0.1),
            "numerics.long_query_floor": key("floor_scale", 8192),
            "moe.experts": key("num_local_experts", 16),
            "moe.top_k": key("num_experts_per_tok", 1),
            "moe.ffn": key("intermediate_size", 8192),
            "moe.shared_ffn": key("intermediate_size", 8192, write=lambda value, model: model.moe.ffn),
        },
        layers=48, hidden=5120, heads=40, kv_heads=8, head_dim=128, vocab=202048, max_seq=131072,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 500_000.0},
    ),
    {**RMS, "moe.router": "sigmoid", "moe.weighs_inputs": True, "numerics.renormalise_top_k": False},
    also=_listed,
    layers=_layers,
    tensors=replace(
        stored_as(
            "Llama4ForCausalLM",
            ATTENTION, joined_experts_in("feed_forward.experts"),
            {"mlp.router.gate": "feed_forward.router"},
            {f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            {f"mlp.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            interleaved=QUERY_AND_KEY,
        ),
        joined_experts=JoinedExperts(transposed=True),
    ),
)

FAMILIES = (_LLAMA_4,)
# fmt: on
