"""The constants a model computes with, in Megatron-LM's arguments.

Defaults that no option changes stand in ``megatron/core``: Llama 3's stretching keeps 8192 positions and the
turns 1 and 4 (``rotary_pos_embedding.py``), YaRN keeps 4096 positions and the turns 32 and 1 and belongs to latent
attention (``MLATransformerConfig``). Softmax routing normalises over the chosen experts unless
``--moe-router-pre-softmax``; the fused bias and gelu of a layer with biases is the tanh form.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.target import Reading
from shardwise.spec.model import Model

_BALANCE = "--moe-router-load-balancing-type"
_LLAMA3_SEQ, _YARN_SEQ = 8192, 4096

REASONS = {
    "model.numerics.rope_scaling": "the frequencies' limits and the first length are fixed in Megatron's code",
    "model.numerics.renormalise_top_k": "sigmoid scores of several experts are always normalised",
    "model.numerics.gelu": "the fused gelu of layers with biases is the tanh form, the other the exact one",
}


def compose(model: Model) -> Settings:
    numerics = model.numerics
    settings: Settings = {"--norm-epsilon": numerics.norm_epsilon, **_rotary(model)}
    if model.activation == "gelu" and model.mlp_bias and numerics.gelu == "exact":
        settings["--no-bias-gelu-fusion"] = True
    if model.moe is not None:
        as_they_are = model.moe.router == "softmax" and not numerics.renormalise_top_k
        settings["--moe-router-pre-softmax"] = as_they_are or None
        settings["--moe-router-topk-scaling-factor"] = numerics.router_scale if numerics.router_scale != 1 else None
        settings[_BALANCE] = "seq_aux_loss" if numerics.balance_loss else "none"
        settings["--moe-aux-loss-coeff"] = numerics.balance_loss or None
        settings["--moe-router-bias-update-rate"] = numerics.bias_rate if model.moe.router_bias else None
    return settings


def _rotary(model: Model) -> Settings:
    if model.positions != "rope":
        return {}
    scaling = model.numerics.rope_scaling
    settings: Settings = {"--rotary-base": _whole(model.numerics.rope_theta)}
    if model.mla is not None:
        settings["--rope-type"] = "rope"
    if scaling is None:
        return settings
    if scaling.kind == "linear" and scaling.factor.is_integer():
        settings["--rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    elif scaling.kind == "llama3" and model.mla is None:
        settings.update({"--use-rope-scaling": True, "--rope-scaling-factor": scaling.factor})
    elif scaling.kind == "yarn" and model.mla is not None:
        settings.update({"--rope-type": "yarn", "--rotary-scaling-factor": scaling.factor})
        settings.update({"--mscale": scaling.mscale, "--mscale-all-dim": scaling.mscale_all})
    return settings


def interpret(reading: Reading, *, latent: bool, gelu: bool, biased: bool, experts: bool) -> dict[str, Any]:
    """Fields of ``model.numerics`` by their name in the model."""
    unfused = reading.flag("--no-bias-gelu-fusion")
    found: dict[str, Any] = {
        "norm_epsilon": reading.number("--norm-epsilon", 1e-5),
        "rope_theta": reading.number("--rotary-base", 10_000),
        **_read_scaling(reading, latent),
    }
    if gelu:
        found["gelu"] = "exact" if unfused or not biased else "tanh"
    if experts:
        balanced = reading.text(_BALANCE, "aux_loss") != "none"
        found["balance_loss"] = reading.number("--moe-aux-loss-coeff", 0) if balanced else 0
        found["bias_rate"] = reading.number("--moe-router-bias-update-rate", 1e-3)
        found["router_scale"] = reading.number("--moe-router-topk-scaling-factor", 1)
        found["renormalise_top_k"] = not reading.flag("--moe-router-pre-softmax")
    return {f"numerics.{name}": value for name, value in found.items()}


def _read_scaling(reading: Reading, latent: bool) -> dict[str, Any]:
    linear = reading.number("--rotary-seq-len-interpolation-factor")
    factor = reading.number("--rotary-scaling-factor", 1)
    scales = {"mscale": reading.number("--mscale", 1), "mscale_all": reading.number("--mscale-all-dim", 0)}
    llama3, by = reading.flag("--use-rope-scaling"), reading.number("--rope-scaling-factor", 8)
    stretched = reading.text("--rope-type", "yarn" if latent else "rope") == "yarn"
    scaling: dict[str, Any] = {}
    if latent and stretched and factor != 1:
        scaling = {"kind": "yarn", "factor": factor, "original_seq": _YARN_SEQ, **scales}
    elif llama3 and not latent:
        scaling = {"kind": "llama3", "factor": by, "original_seq": _LLAMA3_SEQ}
    elif linear is not None:
        scaling = {"kind": "linear", "factor": linear}
    return {f"rope_scaling.{name}": value for name, value in scaling.items()}


def _whole(value: float) -> float | int:
    """``--rotary-base`` takes a whole number."""
    return int(value) if float(value).is_integer() else value
