"""Phi."""

from __future__ import annotations

from typing import Any

from shardwise.interop.families.shared import (
    BIASED,
    GROUPED,
    KV_HEADS,
    NUMERICS,
    RMS,
    ROTARY_SHARE,
    SHAPE,
    SILU,
    WINDOW,
)
from shardwise.interop.keys import PLAIN, Family, activation, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, FREQUENCIES, OUTSIDE, QUERY_KEY_VALUE, TensorNames
from shardwise.spec.model import Model


def _phi_3_lengths(model: Model) -> dict[str, Any]:
    """What Phi-3 keeps outside ``rope_scaling``."""
    scaling = model.numerics.rope_scaling
    return {"original_max_position_embeddings": (scaling and scaling.original_seq) or model.max_seq}


# fmt: off
_PHI_NAMES = TensorNames(
    "PhiForCausalLM",
    {
        **ATTENTION,
        "attention.output": "self_attn.dense",
        "attention.query_norm": "self_attn.q_layernorm",
        "attention.key_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    {**OUTSIDE, "norm": "model.final_layernorm"},
    ignored=FREQUENCIES,
)
_PHI_3_NAMES = TensorNames(
    "Phi3ForCausalLM",
    {
        **ATTENTION,
        **dict.fromkeys(QUERY_KEY_VALUE, "self_attn.qkv_proj"),
        "mlp.gate": "mlp.gate_up_proj",
        "mlp.up": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    },
    OUTSIDE,
    fused=(QUERY_KEY_VALUE, ("mlp.gate", "mlp.up")),
    ignored=FREQUENCIES,
)
_PHI = Family(
    "phi",
    with_defaults(
        {
            **SHAPE, **KV_HEADS, **NUMERICS, **ROTARY_SHARE,
            **activation("hidden_act", "gelu_new", PLAIN),
            "qk_norm": key("qk_layernorm", False),
            "numerics.norm_epsilon": key("layer_norm_eps", 1e-5),
        },
        layers=24, hidden=2048, ffn=8192, vocab=51200, **{"numerics.rotary_share": 0.5},
    ),
    {
        **BIASED, "norm": "layernorm", "positions": "rope", "parallel_block": True, "norms_per_layer": 1,
        "lm_head_bias": True,
    },
    tensors=_PHI_NAMES,
)
_PHI_3 = Family(
    "phi3",
    with_defaults(
        {**GROUPED, **SILU, **WINDOW, **NUMERICS, **ROTARY_SHARE},
        hidden=3072, ffn=8192, vocab=32064, max_seq=4096, **{"numerics.norm_epsilon": 1e-5},
    ),
    RMS,
    also=_phi_3_lengths,
    tensors=_PHI_3_NAMES,
)

FAMILIES = (_PHI, _PHI_3)
# fmt: on
