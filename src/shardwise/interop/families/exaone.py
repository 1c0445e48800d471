"""EXAONE 4: norms behind attention and MLP; with windows, layers without one have no positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.interop import keys
from shardwise.interop.families.shared import GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, OUT_NORMS, stored_as
from shardwise.spec.layers import LayerRecord


def _layers(config: Config, layers: Sequence[LayerRecord]) -> list[LayerRecord]:
    windowed = config["sliding_window"] is not None
    every = config.get("sliding_window_pattern", 4)
    every = len(every) if isinstance(every, str) else every  # "LLLG": three local layers, then a global one
    listed = keys.listed_layers(config, layers, keys.usual_every(every) if windowed else lambda index: keys.GLOBAL)
    return [replace(layer, rotary=not windowed or layer.mixer == "window") for layer in listed]


# fmt: off
_EXAONE_4 = Family(
    "exaone4",
    with_defaults(
        {**GROUPED, **SILU, **NUMERICS, "sliding_window": key("sliding_window", 4096, nullable=True)},
        kv_heads=32, ffn=16384, vocab=102400, **{"numerics.norm_epsilon": 1e-5},
    ),
    {**RMS, "norm_after": True, "qk_norm": True},
    also=keys.layer_types,
    tensors=stored_as("Exaone4ForCausalLM", ATTENTION, MLP, OUT_NORMS),
    layers=_layers,
)

FAMILIES = (_EXAONE_4,)
# fmt: on
