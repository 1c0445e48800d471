"""Granite 3: factors of embeddings, residuals, attention scores and logits (muP, arXiv 2203.03466)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key
from shardwise.interop.tensor_names import ATTENTION, MLP, JoinedExperts, joined_experts_in, stored_as
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model


def _inverse(name: str, power: float) -> dict[str, Any]:
    """A factor that the config and `Model` store as powers of each other."""

    def read(value: Any, config: Config) -> float:
        if isinstance(value, bool) or not 1e-9 < value < 1e9:
            raise SpecError(name, f"{shown(value)} is not a positive number", "correct that value of the config")
        return _rounded(float(value) ** power)

    return {"read": read, "write": lambda value, model: _plain(name, value, power, model)}


def _plain(name: str, value: Any, power: float, model: Model) -> float:
    if value is None:  # scores are divided by the square root of the head size
        value = model.head_size
    return _rounded(float(value) ** (1 / power))


def _rounded(value: float) -> float:
    """To fewer digits than rounding errors reach, so that a factor survives being stored as its inverse."""
    return float(f"{value:.12g}")


# fmt: off
GRANITE_FACTORS = {
    "numerics.embedding_scale": key("embedding_multiplier", 1.0),
    "numerics.residual_scale": key("residual_multiplier", 1.0),
    "numerics.logit_scale": key("logits_scaling", 1.0, **_inverse("logits_scaling", -1.0)),
    "numerics.attention_scalar": key("attention_multiplier", 1.0, **_inverse("attention_multiplier", -2.0)),
}
_GRANITE = Family(
    "granite",
    {**GROUPED, **SILU, **BIAS, **NUMERICS, **GRANITE_FACTORS, "mlp_bias": key("mlp_bias", False)},
    RMS,
    tensors=stored_as("GraniteForCausalLM", ATTENTION, MLP),
)

_MIXTURE_KEYS = {
    **GROUPED, **SILU, **BIAS, **NUMERICS, **GRANITE_FACTORS,
    "moe.experts": key("num_local_experts", 8),
    "moe.top_k": key("num_experts_per_tok", 2),
    "moe.ffn": key("intermediate_size", 11008),
}
_MIXTURE_NAMES = replace(
    stored_as(
        "GraniteMoeForCausalLM",
        ATTENTION,
        joined_experts_in("block_sparse_moe", "input_linear.weight", "output_linear.weight"),
        {"mlp.router.gate": "block_sparse_moe.router.layer"},
        dict.fromkeys(("mlp.shared.gate", "mlp.shared.up"), "shared_mlp.input_linear"),
        {"mlp.shared.down": "shared_mlp.output_linear"},
    ),
    joined_experts=JoinedExperts(),
    fused=(("mlp.shared.gate", "mlp.shared.up"),),
    in_memory={**joined_experts_in("block_sparse_moe.experts"), "mlp.router.gate": "block_sparse_moe.router"},
)
_GRANITE_MOE = Family("granitemoe", _MIXTURE_KEYS, RMS, tensors=_MIXTURE_NAMES)
_GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    {**_MIXTURE_KEYS, "moe.shared_ffn": key("shared_intermediate_size", 0)},
    RMS,
    tensors=replace(_MIXTURE_NAMES, architecture="GraniteMoeSharedForCausalLM"),
)

FAMILIES = (_GRANITE, _GRANITE_MOE, _GRANITE_MOE_SHARED)
# fmt: on
