"""OLMo."""

from __future__ import annotations

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, OUT_NORMS, stored_as

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

FAMILIES = (_OLMO, _OLMO_2)
# fmt: on
