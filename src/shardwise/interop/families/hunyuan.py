"""Hunyuan's dense models: queries and keys are normed behind rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import LIST, NUMBER, Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, EXPERTS, MLP, shared_in, stored_as
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


def _same_for_all(value: Any, config: Config) -> Any:
    """A number that may be listed for every layer."""
    if not isinstance(value, LIST):
        return value
    if not value or any(one != value[0] for one in value):
        raise SpecError("moe_topk", f"{shown(value)} differs between layers", "only one number for all is supported")
    return value[0]


_NAMES = {
    **ATTENTION, "attention.query_norm": "self_attn.query_layernorm", "attention.key_norm": "self_attn.key_layernorm"
}  # fmt: skip


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
    tensors=stored_as("HunYuanDenseV1ForCausalLM", _NAMES, MLP),
)

_HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    {
        **_HUNYUAN.keys,
        "moe.experts": key("num_experts|num_local_experts", 1),
        "moe.top_k": key("moe_topk|num_experts_per_tok", 1, types=(*NUMBER, *LIST), read=_same_for_all),
        "moe.ffn": key("intermediate_size", 11008),
        "moe.shared_ffn": key("intermediate_size", 11008, write=lambda value, model: model.moe.ffn),
    },
    _HUNYUAN.fixed,
    tensors=replace(
        stored_as(
            "HunYuanMoEV1ForCausalLM",
            _NAMES, EXPERTS, shared_in("shared_mlp"), {"mlp.router.gate": "mlp.gate.wg"},
        ),
        in_memory={"mlp.router.gate": "mlp.gate.wg"},
    ),
)

FAMILIES = (_HUNYUAN, _HUNYUAN_MOE)
# fmt: on
