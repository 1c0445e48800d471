"""Apertus: an activation that learns its curvature."""

from __future__ import annotations

from dataclasses import replace

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS
from shardwise.interop.keys import Family, activation, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as

# fmt: off
_SCALING = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}
_APERTUS = Family(
    "apertus",
    with_defaults(
        {
            **GROUPED, **BIAS, **NUMERICS, **activation("hidden_act", "xielu", {"xielu": "xielu"}),
            "numerics.rope_scaling": keys.rope_scaling(usual=_SCALING),
        },
        ffn=14336, vocab=131072, max_seq=65536,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 12e6},
    ),
    {**RMS, "qk_norm": True},
    tensors=replace(
        stored_as(
            "ApertusForCausalLM", ATTENTION, MLP,
            {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm",
             "mlp.activation.above": "mlp.act_fn.alpha_p", "mlp.activation.below": "mlp.act_fn.alpha_n"},
        ),
        constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
)

FAMILIES = (_APERTUS,)
# fmt: on
