"""DeepSeek. The config's ``head_dim`` is the rotary part of a head, so it is not read."""

from __future__ import annotations

from typing import Any

from shardwise.interop.families.shared import KV_HEADS, NUMERICS, RMS, SHAPE, SILU
from shardwise.interop.keys import TEXT, Config, Family, key, with_defaults
from shardwise.interop.tensor_names import ATTENTION, EXPERTS, LATENT, MLP, shared_in, stored_as
from shardwise.spec.model import Model


def _routing_method(value: Any, model: Model) -> str:
    if value:
        return "noaux_tc"
    return "group_limited_greedy" if model.moe and model.moe.groups > 1 else "greedy"


def _leading_dense(value: Any, model: Model) -> int:
    """Also of a model whose layers are listed by a pattern."""
    kinds = [layer.feed_forward for layer in model.every_layer[: model.layers]]
    return kinds.index("mixture") if "mixture" in kinds else len(kinds)


def _expert_groups(value: Any, config: Config) -> Any:
    return 1 if value is None or config["topk_method"] == "greedy" else value


# fmt: off
_NAMES = {**ATTENTION, **LATENT, **MLP, **EXPERTS, **shared_in("shared_experts")}
BALANCING_BIAS = {"mlp.router.bias": "mlp.gate.e_score_correction_bias"}
# Beside copies of embedding and head, which are not read.
PREDICTION = {"token_norm": "enorm", "hidden_norm": "hnorm", "joined": "eh_proj", "norm": "shared_head.norm"}
_INTERLEAVED = frozenset({"attention.query", "attention.query_up", "attention.key_value_down"})
MIXTURE = {
    "moe.experts": key("n_routed_experts|num_local_experts", 64),
    "moe.top_k": key("num_experts_per_tok", None, nullable=False),
    "moe.ffn": key("moe_intermediate_size", 1407),
    "moe.shared_ffn": key(  # the config counts experts, `Model` takes the width of all of them together
        "n_shared_experts", 2, nullable=True,
        read=lambda value, config: (value or 0) * config["moe_intermediate_size"],
        write=lambda value, model: value // model.moe.ffn if model.moe else 0,
    ),
    "moe.dense_layers": key("first_k_dense_replace", 0, write=_leading_dense),
    "numerics.router_scale": key("routed_scaling_factor", 1.0),
    "numerics.renormalise_top_k": key("norm_topk_prob", False),
}
# Of families whose scores are sigmoids balanced by a bias, with groups of experts.
BALANCED_KEYS = {**MIXTURE, "moe.groups": key("n_group", 1), "moe.groups_used": key("topk_group", 1)}
BALANCED = {"moe.router": "sigmoid", "moe.router_bias": True}
BALANCED_NAMES = {**MLP, **EXPERTS, **shared_in("shared_experts"), **BALANCING_BIAS}
_DEEPSEEK = {
    **SHAPE, **KV_HEADS, **SILU, **NUMERICS, **MIXTURE,
    "mla.q_rank": key("q_lora_rank", 1536, nullable=True),
    "mla.kv_rank": key("kv_lora_rank", 512),
    "mla.nope_dim": key("qk_nope_head_dim", 128),
    "mla.rope_dim": key("qk_rope_head_dim", 64),
    "mla.value_dim": key("v_head_dim", 128),
    "moe.router": key("scoring_func", "softmax", types=TEXT),
    "moe.router_bias": key(  # load is balanced by a bias on the router under this name of the method
        "topk_method", "greedy", types=TEXT, read=lambda value, config: value == "noaux_tc", write=_routing_method
    ),
    "moe.groups": key("n_group", None, read=_expert_groups),
    "moe.groups_used": key("topk_group", None, read=_expert_groups),
}
_DEEPSEEK_REQUIRES = {"moe_layer_freq": 1, "attention_bias": False, "use_mla": True}
# transformers never normalises this family's weights of experts, whatever norm_topk_prob says.
_DEEPSEEK_V2 = Family(
    "deepseek_v2", _DEEPSEEK, RMS, {**_DEEPSEEK_REQUIRES, "scoring_func": "softmax", "norm_topk_prob": False},
    tensors=stored_as("DeepseekV2ForCausalLM", _NAMES, interleaved=_INTERLEAVED),
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    with_defaults(
        {**_DEEPSEEK, "mtp_layers": key("num_nextn_predict_layers", 0)},
        layers=61, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, max_seq=4096,
        **{"moe.experts": 256, "moe.top_k": 8, "moe.ffn": 2048, "moe.shared_ffn": 1, "moe.dense_layers": 3,
           "moe.router": "sigmoid", "moe.router_bias": "noaux_tc", "moe.groups": 8, "moe.groups_used": 4,
           "numerics.router_scale": 2.5, "numerics.renormalise_top_k": True},
    ),
    RMS,
    {**_DEEPSEEK_REQUIRES, "scoring_func": "sigmoid"},
    tensors=stored_as(
        "DeepseekV3ForCausalLM",
        _NAMES, BALANCING_BIAS, PREDICTION, interleaved=_INTERLEAVED,
    ),
)

FAMILIES = (_DEEPSEEK_V2, _DEEPSEEK_V3)
# fmt: on
