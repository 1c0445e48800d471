"""dots.llm1."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.interop import keys
from shardwise.interop.families.deepseek import BALANCED, BALANCED_KEYS, BALANCED_NAMES
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, stored_as
from shardwise.spec.layers import LayerRecord


def _layers(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    """Layers from ``max_window_layers`` on have the window, if there is one."""
    first = config.get("max_window_layers", 62)
    if config["sliding_window"] is None:
        return keys.listed_layers({}, layers)
    after = first if isinstance(first, int) else len(layers)
    return keys.listed_layers(config, layers, lambda index: keys.GLOBAL if index < after else keys.WINDOWED)


# fmt: off
_DOTS_1 = Family(
    "dots1",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **NUMERICS, **BALANCED_KEYS,
            "sliding_window": key("sliding_window", 4096, nullable=True),
        },
        layers=62, hidden=4608, kv_heads=32, ffn=10944, vocab=152064,
        **{"moe.experts": None, "moe.ffn": 1408, "moe.shared_ffn": None},
    ),
    {**RMS, **BALANCED, "qk_norm": True},
    also=keys.layer_types,
    tensors=stored_as("Dots1ForCausalLM", ATTENTION, BALANCED_NAMES),
    layers=_layers,
)

FAMILIES = (_DOTS_1,)
# fmt: on
