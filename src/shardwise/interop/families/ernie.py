"""Ernie 4.5 and Helium: Llama with the two members of each rotated pair side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.interop.families.shared import BIAS, GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, EXPERTS, MLP, QUERY_AND_KEY, shared_in, stored_as
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model


def _with_mixtures(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    """Every n-th layer from the first to the last index that the config names is a mixture; -1: the last of all."""
    first, last, every = (
        config.get(f"moe_layer_{name}", usual)
        for name, usual in (("start_index", 1), ("end_index", -1), ("interval", 1))
    )
    for name, value, least in (("start_index", first, 0), ("end_index", last, -1), ("interval", every, 1)):
        if type(value) is not int or value < least:
            problem = f"{shown(value)} is not a whole number from {least} on"
            raise SpecError(f"moe_layer_{name}", problem, "correct that value of the config")
    last = len(layers) - 1 if last == -1 else last
    mixtures = {index for index in range(first, min(last + 1, len(layers))) if (index + 1) % every == 0}
    return [
        replace(layer, feed_forward="mixture" if index in mixtures else "dense") for index, layer in enumerate(layers)
    ]


def _mixture_range(model: Model) -> dict[str, Any]:
    mixtures = [index for index in range(model.layers) if model.is_moe_layer(index)]
    every = mixtures[1] - mixtures[0] if len(mixtures) > 1 else 1
    first, last = (mixtures[0], mixtures[-1]) if mixtures else (0, 0)
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": every}


# fmt: off
_ERNIE = Family(
    "ernie4_5",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            **{field: key("use_bias", False) for field in ("qkv_bias", "attention_out_bias", "mlp_bias")},
        },
        layers=18, hidden=1024, heads=16, kv_heads=2, head_dim=128, ffn=3072, vocab=103424, max_seq=131072,
        tied_embeddings=True, **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 5e5},
    ),
    RMS,
    tensors=stored_as("Ernie4_5ForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
)
_ERNIE_MOE = Family(
    "ernie4_5_moe",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            "moe.experts": key("moe_num_experts|num_experts", 64),
            "moe.top_k": key("moe_k|num_experts_per_tok", 6),
            "moe.ffn": key("moe_intermediate_size", 1536),
            "moe.shared_ffn": key(
                "moe_num_shared_experts", 2,
                read=lambda value, config: value * config["moe_intermediate_size"],
                write=lambda value, model: value // model.moe.ffn if model.moe else 0,
            ),
        },
        layers=28, hidden=2560, heads=20, kv_heads=4, ffn=12288, vocab=103424, max_seq=131072, tied_embeddings=True,
        **{"numerics.norm_epsilon": 1e-5, "numerics.rope_theta": 5e5},
    ),
    {**RMS, "moe.router_bias": True},
    {"use_bias": False},
    also=_mixture_range,
    layers=_with_mixtures,
    tensors=replace(
        stored_as(
            "Ernie4_5_MoeForCausalLM",
            ATTENTION, MLP, EXPERTS, shared_in("shared_experts"),
            {"mlp.router.bias": "mlp.moe_statics.e_score_correction_bias"}, interleaved=QUERY_AND_KEY,
        ),
        rows_of_one=frozenset({"mlp.router.bias"}),
        in_memory={"mlp.router.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    ),
)
_HELIUM = Family(
    "helium",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            "qkv_bias": BIAS["qkv_bias"],
            "mlp_bias": key("mlp_bias", False),
        },
        layers=24, hidden=2560, heads=20, kv_heads=20, head_dim=128, ffn=7040, vocab=48000, max_seq=4096,
        **{"numerics.norm_epsilon": 1e-8, "numerics.rope_theta": 1e5},
    ),
    RMS,
    {"head_dim": lambda config: config["hidden_size"] // max(1, config["num_attention_heads"])},
    tensors=stored_as("HeliumForCausalLM", ATTENTION, MLP, interleaved=QUERY_AND_KEY),
)

FAMILIES = (_ERNIE, _ERNIE_MOE, _HELIUM)
# fmt: on
