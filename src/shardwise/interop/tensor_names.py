"""What families call the tensors of a decoder, and in which layout they store them.

A module's name maps to a module's name; its ``weight`` and ``bias`` follow. ``{}`` is the number of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class JoinedExperts:
    """All experts of a layer as two tensors: gates and ups, and downs."""

    transposed: bool = False  # [experts, inputs, outputs] in place of [experts, outputs, inputs]
    alternating: bool = False  # gate and up take turns; else all of the gate comes first


@dataclass(frozen=True)
class TensorNames:
    """The names and layouts of one ``model_type``."""

    architecture: str
    inside: Mapping[str, str]  # modules of a layer: their names by ours
    outside: Mapping[str, str]  # modules outside of the layers
    layer: str = "model.layers.{}."
    transposed: frozenset[str] = frozenset()  # modules (ours) that are stored as [inputs, outputs]
    fused: tuple[tuple[str, ...], ...] = ()
    """Groups of modules (ours) that are parts, in this order, of one stored module."""
    by_head: bool = False  # fused parts follow each other head by head
    interleaved: frozenset[str] = frozenset()
    """Modules (ours) whose heads are stored with the two members of each rotated pair side by side; ours have all first
    members, then all second ones."""
    prefix: str = "model."  # stands before every name but the head's; some published files leave it out
    ignored: tuple[str, ...] = ()  # endings of stored tensors that are not parameters
    constants: Mapping[str, float] = field(default_factory=dict)  # scalars of every layer that are no parameters
    joined_experts: JoinedExperts | None = None  # None: each expert's matrices are tensors of their own
    rows_of_one: frozenset[str] = frozenset()  # tensors (ours) that are stored as a matrix of one row
    in_memory: Mapping[str, str] = field(default_factory=dict)  # names that differ there, beside those of experts

    def is_in_memory(self, names: Collection[str]) -> bool:
        """Whether these are the names that `transformers` 5 has in memory for experts, where these differ."""
        own = any(theirs.endswith(JOINED_EXPERTS) for theirs in self.inside.values())
        return not own and any(name.endswith(JOINED_EXPERTS) for name in names)

    def with_joined_experts(self) -> TensorNames:
        """The layout that `transformers` 5 has in memory for a mixture of experts, and saves unless it converts."""
        names = {**_JOINED_EXPERTS, "mlp.router.gate": "mlp.gate", **self.in_memory}
        return replace(self, joined_experts=JoinedExperts(), inside={**self.inside, **names})


JOINED_EXPERTS = ".experts.gate_up_proj"
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
ATTENTION = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
LATENT = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_down_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_down_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}


def experts_in(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """A router and the matrices of its experts, each a module of its own."""
    names = {"gate": gate, "up": up, "down": down}
    own = {f"mlp.experts.{part}": f"{block}.experts.{{}}.{theirs}" for part, theirs in names.items()}
    return {"mlp.router.gate": f"{block}.gate", **own}


EXPERTS = experts_in("mlp", "gate_proj", "up_proj", "down_proj")


def joined_experts_in(block: str, both: str = "gate_up_proj", down: str = "down_proj") -> dict[str, str]:
    """The tensors of joined experts, and of their biases."""
    names = {"gate": both, "up": both, "down": down}
    matrices = {f"mlp.experts.{part}": f"{block}.{theirs}" for part, theirs in names.items()}
    return {**matrices, **{f"{ours}_bias": f"{theirs}_bias" for ours, theirs in matrices.items()}}


_JOINED_EXPERTS = joined_experts_in("mlp.experts")


def shared_in(theirs: str) -> dict[str, str]:
    """The shared experts, in a module of the MLP."""
    return {f"mlp.shared.{part}": f"mlp.{theirs}.{part}_proj" for part in ("gate", "up", "down")}


OUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
BOTH_NORMS = {**OUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"}
QUERY_AND_KEY = frozenset({"attention.query", "attention.key"})
QUERY_KEY_VALUE = ("attention.query", "attention.key", "attention.value")
FREQUENCIES = ("rotary_emb.inv_freq",)


def stored_as(architecture: str, *inside: Mapping[str, str], interleaved: frozenset[str] = frozenset()) -> TensorNames:
    """The usual names, with those ``inside`` the layers in one or several tables, of which later ones win."""
    every = {ours: theirs for part in inside for ours, theirs in part.items()}
    return TensorNames(architecture, every, OUTSIDE, interleaved=interleaved, ignored=FREQUENCIES)
