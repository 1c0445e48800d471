"""Hunyuan's dense models: queries and keys are normed behind rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, MLP, stored_as
from shardwise.spec.errors import SpecError, shown

_SCALING = keys.rope_scaling()


def _fixed_stretch(config: Config) -> Any:
    """The alpha by which NTK-aware scaling raises the base once and for all, or None; the configs call it dynamic."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(given, dict) or "dynamic" not in (given.get("rope_type"), given.get("type")):
        return None
    return given.get("alpha")


def _theta(value: Any, config: Config) -> Any:
    theta, alpha = keys.rotary("rope_theta")(value, config), _fixed_stretch(config)
    if alpha is None:
        return theta
    size = config["head_dim"] or config["hidden_size"] // max(1, config["num_attention_heads"])
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < 1e9 or size <= 2:
        raise SpecError("rope_scaling.alpha", f"{shown(alpha)} is not a positive number", "correct that value")
    return theta * alpha ** (size / (size - 2))


def _scaling(value: Any, config: Config) -> Any:
    return None if _fixed_stretch(config) is not None else _SCALING.read(value, config)


# fmt: off
_HUNYUAN = Family(
    "hunyuan_v1_dense",
    with_defaults(
        {
            **GROUPED, **SILU, **BIAS, **NUMERICS,
            "numerics.rope_theta": key("rope_theta", 10_000.0, read=_theta),
            "numerics.rope_scaling": replace(_SCALING, read=_scaling),
        },
        vocab=290943, **{"numerics.norm_epsilon": 1e-5},
    ),
    {**RMS, "qk_norm": True, "qk_norm_rotated": True},
    tensors=stored_as(
        "HunYuanDenseV1ForCausalLM", ATTENTION, MLP,
        {"attention.query_norm": "self_attn.query_layernorm", "attention.key_norm": "self_attn.key_layernorm"},
    ),
)

FAMILIES = (_HUNYUAN,)
# fmt: on
