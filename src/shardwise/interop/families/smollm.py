"""SmolLM3: some layers without positions (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU, WINDOW
from shardwise.interop.keys import LIST, Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model


def without_rope(config: Config, layers: Sequence[LayerRecord]) -> list[LayerRecord]:
    """``no_rope_layers`` has 0 for a layer without rope; every n-th layer where the list is absent."""
    every, listed = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    if type(every) is not int or every < 1:
        raise SpecError("no_rope_layer_interval", f"{shown(every)} is not a positive number", "correct it")
    if listed is None:
        listed = [int((index + 1) % every != 0) for index in range(len(layers))]
    if not isinstance(listed, LIST) or len(listed) < len(layers) or not all(one in (0, 1) for one in listed):
        problem = f"{shown(listed)} does not list {len(layers)} layers as 0 or 1"
        raise SpecError("no_rope_layers", problem, "give one for each layer")
    return [replace(layer, rotary=bool(one)) for one, layer in zip(listed, layers)]


def rope_layers(model: Model) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer.rotary) for layer in model.every_layer[: model.layers]]}


def _layers(config: Config, layers: Sequence[LayerRecord]) -> list[LayerRecord]:
    rotated = without_rope(config, layers)
    windows = config.get("use_sliding_window", False) and config["sliding_window"] is not None
    return keys.listed_layers(
        config, rotated, lambda index: keys.WINDOWED if windows and not rotated[index].rotary else keys.GLOBAL
    )


def _written(model: Model) -> dict[str, Any]:
    windows = {"use_sliding_window": model.sliding_window is not None}
    return {**windows, **rope_layers(model), **keys.layer_types(model)}


# fmt: off
_SMOLLM_3 = Family(
    "smollm3",
    with_defaults(
        {**GROUPED, **SILU, **BIAS, **WINDOW, **NUMERICS, "mlp_bias": key("mlp_bias", False)},
        layers=36, hidden=2048, heads=16, kv_heads=4, vocab=128256, max_seq=32768, tied_embeddings=True,
        **{"numerics.rope_theta": 2e6},
    ),
    RMS,
    also=_written,
    tensors=stored_as("SmolLM3ForCausalLM", ATTENTION, MLP),
    layers=_layers,
)

FAMILIES = (_SMOLLM_3,)
# fmt: on
