"""The names and layouts of a decoder's tensors in the families of Hugging Face.

A module's name maps to a module's name; its ``weight`` and ``bias`` follow. ``{}`` is the number of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FamilyLayout:
    """The names and layouts of one ``model_type``."""

    architecture: str
    inside: Mapping[str, str]
    """Modules of a layer: their names by ours."""
    outside: Mapping[str, str]
    """Modules outside of the layers."""
    layer: str = "model.layers.{}."
    transposed: frozenset[str] = frozenset()
    """Modules (ours) that are stored as [inputs, outputs]."""
    fused: tuple[tuple[str, ...], ...] = ()
    """Groups of modules (ours) that are parts, in this order, of one stored module."""
    by_head: bool = False
    """Fused parts follow each other head by head."""
    interleaved: frozenset[str] = frozenset()
    """Modules (ours) whose heads are stored with the two members of each rotated pair side by side; ours have all first
    members, then all second ones."""
    prefix: str = "model."
    """Stands before every name but the head's; some published files leave it out."""
    ignored: tuple[str, ...] = ()
    """Endings of stored tensors that are not parameters."""
    joined_experts: bool = False
    """One tensor holds all experts' gates and ups, another their downs."""

    def with_joined_experts(self) -> FamilyLayout:
        """The layout that `transformers` 5 has in memory for a mixture of experts, and saves unless it converts."""
        return replace(self, joined_experts=True, inside={**self.inside, **_JOINED_EXPERTS})


JOINED_EXPERTS = "mlp.experts.gate_up_proj"
_JOINED_EXPERTS = {
    "mlp.router.gate": "mlp.gate",
    "mlp.experts.gate": JOINED_EXPERTS,
    "mlp.experts.up": JOINED_EXPERTS,
    "mlp.experts.down": "mlp.experts.down_proj",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_ATTENTION = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
_LATENT = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_down_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_down_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    own = {f"mlp.experts.{part}": f"{block}.experts.{{}}.{theirs}" for part, theirs in names.items()}
    return {"mlp.router.gate": f"{block}.gate", **own}


_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")


def _shared(theirs: str) -> dict[str, str]:
    return {f"mlp.shared.{part}": f"mlp.{theirs}.{part}_proj" for part in ("gate", "up", "down")}


_OUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_BOTH_NORMS = {**_OUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"}
_QUERY_KEY_VALUE = ("attention.query", "attention.key", "attention.value")

_DEEPSEEK = {**_ATTENTION, **_LATENT, **_MLP, **_EXPERTS, **_shared("shared_experts")}
# Beside copies of embedding and head, which are not read.
_PREDICTION = {"token_norm": "enorm", "hidden_norm": "hnorm", "joined": "eh_proj", "norm": "shared_head.norm"}
_INTERLEAVED = frozenset({"attention.query", "attention.query_up", "attention.key_value_down"})
_FREQUENCIES = ("rotary_emb.inv_freq",)

_GPT_2 = FamilyLayout(
    "GPT2LMHeadModel",
    {
        "attention_norm": "ln_1",
        **dict.fromkeys(_QUERY_KEY_VALUE, "attn.c_attn"),
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer="transformer.h.{}.",
    transposed=frozenset({*_QUERY_KEY_VALUE, "attention.output", "mlp.up", "mlp.down"}),
    fused=(_QUERY_KEY_VALUE,),
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias"),
)
_GPT_NEOX = FamilyLayout(
    "GPTNeoXForCausalLM",
    {
        "attention_norm": "input_layernorm",
        **dict.fromkeys(_QUERY_KEY_VALUE, "attention.query_key_value"),
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    layer="gpt_neox.layers.{}.",
    fused=(_QUERY_KEY_VALUE,),
    by_head=True,
    prefix="gpt_neox.",
    ignored=("attention.bias", "attention.masked_bias", *_FREQUENCIES),
)
_PHI = FamilyLayout(
    "PhiForCausalLM",
    {
        **_ATTENTION,
        "attention.output": "self_attn.dense",
        "attention.query_norm": "self_attn.q_layernorm",
        "attention.key_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    {**_OUTSIDE, "norm": "model.final_layernorm"},
    ignored=_FREQUENCIES,
)
_PHI_3 = FamilyLayout(
    "Phi3ForCausalLM",
    {
        **_ATTENTION,
        **dict.fromkeys(_QUERY_KEY_VALUE, "self_attn.qkv_proj"),
        "mlp.gate": "mlp.gate_up_proj",
        "mlp.up": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    },
    _OUTSIDE,
    fused=(_QUERY_KEY_VALUE, ("mlp.gate", "mlp.up")),
    ignored=_FREQUENCIES,
)


def _layout(architecture: str, *inside: Mapping[str, str], interleaved: frozenset[str] = frozenset()) -> FamilyLayout:
    names = {ours: theirs for part in inside for ours, theirs in part.items()}
    return FamilyLayout(architecture, names, _OUTSIDE, interleaved=interleaved, ignored=_FREQUENCIES)


LAYOUTS: dict[str, FamilyLayout] = {
    "llama": _layout("LlamaForCausalLM", _ATTENTION, _MLP),
    "mistral": _layout("MistralForCausalLM", _ATTENTION, _MLP),
    "mixtral": _layout("MixtralForCausalLM", _ATTENTION, _MIXTRAL_EXPERTS),
    "qwen2": _layout("Qwen2ForCausalLM", _ATTENTION, _MLP),
    "qwen3": _layout("Qwen3ForCausalLM", _ATTENTION, _MLP),
    "qwen2_moe": _layout(
        "Qwen2MoeForCausalLM",
        _ATTENTION, _MLP, _EXPERTS, _shared("shared_expert"), {"mlp.shared_gate": "mlp.shared_expert_gate"},
    ),
    "qwen3_moe": _layout("Qwen3MoeForCausalLM", _ATTENTION, _MLP, _EXPERTS),
    "deepseek_v2": _layout("DeepseekV2ForCausalLM", _DEEPSEEK, interleaved=_INTERLEAVED),
    "deepseek_v3": _layout(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK, {"mlp.router.bias": "mlp.gate.e_score_correction_bias"}, _PREDICTION, interleaved=_INTERLEAVED,
    ),
    "gpt2": _GPT_2,
    "gpt_neox": _GPT_NEOX,
    "phi": _PHI,
    "phi3": _PHI_3,
    "olmo": _layout("OlmoForCausalLM", _ATTENTION, _MLP),
    "olmo2": _layout("Olmo2ForCausalLM", _ATTENTION, _MLP, _OUT_NORMS),
    "gemma": _layout("GemmaForCausalLM", _ATTENTION, _MLP),
    "gemma2": _layout("Gemma2ForCausalLM", _ATTENTION, _MLP, _BOTH_NORMS),
    "gemma3_text": _layout("Gemma3ForCausalLM", _ATTENTION, _MLP, _BOTH_NORMS),
}  # fmt: skip
LAYOUTS["kimi_k2"] = LAYOUTS["deepseek_v3"]
