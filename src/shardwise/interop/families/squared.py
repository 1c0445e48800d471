"""Nemotron and Arcee: MLPs of a squared ReLU without a gate."""

from __future__ import annotations

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, ROTARY_SHARE
from shardwise.interop.keys import SQUARED, Family, activation, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as

# fmt: off
_KEYS = with_defaults(
    {**GROUPED, **BIAS, **NUMERICS, **activation("hidden_act", "relu2", SQUARED), "mlp_bias": key("mlp_bias", False)},
    max_seq=4096,
)
_NEMOTRON = Family(
    "nemotron",
    with_defaults(
        {**_KEYS, **ROTARY_SHARE, "numerics.norm_epsilon": key("norm_eps", 1e-5)},
        hidden=6144, heads=48, ffn=24576, vocab=256000, **{"numerics.rotary_share": 0.5},
    ),
    {"norm": "layernorm", "positions": "rope", "numerics.norm_plus_one": True},
    tensors=stored_as("NemotronForCausalLM", ATTENTION, MLP),
)
_ARCEE = Family(
    "arcee",
    with_defaults(_KEYS, hidden=2560, ffn=18432, **{"numerics.norm_epsilon": 1e-5}),
    RMS,
    tensors=stored_as("ArceeForCausalLM", ATTENTION, MLP),
)

FAMILIES = (_NEMOTRON, _ARCEE)
# fmt: on
