"""dots.llm1."""

from __future__ import annotations

from typing import Any

from shardwise.interop.families.deepseek import BALANCED, BALANCED_KEYS, BALANCED_NAMES
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import GLOBAL, Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, stored_as
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model


def _window(value: Any, config: Config) -> Any:
    """The window of layers from ``max_window_layers`` on, of all of them or none."""
    first, kinds = config.get("max_window_layers", 62), config.get("layer_types")
    if value is None or (isinstance(kinds, list) and set(kinds) == {GLOBAL}):
        return None
    if isinstance(first, int) and first >= config["num_hidden_layers"]:
        return None
    if first != 0:
        raise SpecError("max_window_layers", f"{first} leaves some layers unwindowed", "use 0, or no window")
    return value


def _window_switch(model: Model) -> dict[str, Any]:
    return {"max_window_layers": 0 if model.sliding_window else model.layers}


# fmt: off
_DOTS_1 = Family(
    "dots1",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **NUMERICS, **BALANCED_KEYS,
            "sliding_window": key("sliding_window", 4096, nullable=True, read=_window),
        },
        layers=62, hidden=4608, kv_heads=32, ffn=10944, vocab=152064,
        **{"moe.experts": None, "moe.ffn": 1408, "moe.shared_ffn": None},
    ),
    {**RMS, **BALANCED, "qk_norm": True},
    also=_window_switch,
    tensors=stored_as("Dots1ForCausalLM", ATTENTION, BALANCED_NAMES),
)

FAMILIES = (_DOTS_1,)
# fmt: on
