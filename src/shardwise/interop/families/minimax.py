"""MiniMax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop import keys
from shardwise.interop.families.shared import GROUPED, NUMERICS, RMS, SILU
from shardwise.interop.keys import Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, experts_in, stored_as

_plain_share = keys.rotary("partial_rotary_factor")


def _rotary_share(value: Any, config: Config) -> Any:
    """The published configs give the number of rotated features."""
    features, size = config.get("rotary_dim"), config["head_dim"]
    given = isinstance(features, int) and not isinstance(features, bool) and features > 0 and size
    return _plain_share(features / size if given else value, config)


# fmt: off
_MINIMAX_M2 = Family(
    "minimax_m2",
    with_defaults(
        {
            **GROUPED, **SILU, **NUMERICS,
            "numerics.rotary_share": key("partial_rotary_factor", 1.0, read=_rotary_share),
            "moe.experts": key("num_local_experts", 256),
            "moe.top_k": key("num_experts_per_tok", 8),
            "moe.ffn": key("intermediate_size", 1536),
        },
        layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, ffn=1536, vocab=200064, max_seq=196608,
        **{"numerics.rope_theta": 5e6},
    ),
    {**RMS, "qk_norm": True, "qk_norm_whole": True, "moe.router": "sigmoid", "moe.router_bias": True},
    {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "qk_norm_type": "per_layer"},
    tensors=replace(
        stored_as(
            "MiniMaxM2ForCausalLM",
            ATTENTION, experts_in("block_sparse_moe", "w1", "w3", "w2"),
            {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
        in_memory={"mlp.router.bias": "mlp.e_score_correction_bias"},
    ),
)

FAMILIES = (_MINIMAX_M2,)
# fmt: on
