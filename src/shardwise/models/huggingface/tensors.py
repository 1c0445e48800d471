"""The tensors of a decoder in the families of Hugging Face: what each is called, where it lies, and in which layout.

In a layout a module's name maps to a module's name; its ``weight`` and ``bias`` follow. ``{}`` is the number of an
expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.companions import config_for
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.models.decoder import Decoder
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model


@dataclass(frozen=True)
class FamilyLayout:
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
    joined_experts: bool = False  # one tensor holds all experts' gates and ups, another their downs

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


# -- Where a tensor lies in a folder ---------------------------------------------------------------


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of ours is stored, and in which layout."""

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]  # one stored name, or one per expert if ours is a stack of experts
    stacked: bool = False
    transposed: bool = False
    start: int = 0  # where our outputs begin in fused ones (of each head, with `every`)
    whole: int | None = None  # number of fused outputs; None if ours are not fused with others
    head: int = 0  # rows of a head
    rotated: int = 0  # number of its last rows that are stored with pairs interleaved
    every: int = 0  # number of fused outputs per head
    joined: bool = False
    """All experts are one stored tensor [experts, outputs, inputs], of whose outputs ours may be a part."""

    @property
    def outputs(self) -> int:
        """The dimension of a stored tensor that runs over outputs."""
        return -1 if self.transposed else 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.joined:
            experts, inputs, outputs = self.shape
            return experts, self.whole or outputs, inputs
        shape = self.shape[1:] if self.stacked else self.shape
        shape = shape[::-1] if self.transposed else shape
        if self.whole is None:
            return shape
        return (*shape[:-1], self.whole) if self.transposed else (self.whole, *shape[1:])

    def stored_slices(self, slices: Slices) -> Slices:
        """What to read of a stored tensor for ``slices`` of ours (of one expert's matrix, of a stack)."""
        if self.joined:
            first, last, _ = slices[2].indices(self.shape[2])
            return slices[0], slice(self.start + first, self.start + last), slices[1]
        if self.rotated or self.every:
            return (slice(None), *slices[1:])  # rows change places: all are read, then picked
        if self.whole is not None:
            first, last, _ = slices[0].indices(self.shape[0])
            slices = (slice(self.start + first, self.start + last), *slices[1:])
        return slices[::-1] if self.transposed else slices

    def from_stored(self, stored: Tensor, slices: Slices) -> Tensor:
        """What was read by `stored_slices`, in our layout."""
        if self.rotated or self.every:
            return stored[self._rows()[slices[0]]]
        if self.joined:
            return stored.transpose(1, 2)
        return stored.T if self.transposed else stored

    def to_stored(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our tensor as stored tensors, or as a part of a fused one."""
        for name, matrix in zip(self.names, tensor if self.stacked else (tensor,)):
            if self.rotated:
                yield name, matrix[self._rows().argsort()]
            else:
                yield name, matrix.T if self.transposed else matrix

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes what `to_stored` gave into the fused tensor that it is a part of."""
        if self.every:
            whole[self._rows()] = part
        else:
            whole.narrow(self.outputs, self.start, part.shape[self.outputs]).copy_(part)

    def stored_rows(self) -> Tensor:
        """Which of our outputs each stored one is, where they are not fused with others."""
        return self._rows().argsort() if self.rotated else torch.arange(self.outputs_here)

    def fused_rows(self) -> Tensor:
        """Where each of our outputs is among the fused ones."""
        return self._rows() if self.every else self.start + torch.arange(self.outputs_here)

    @property
    def outputs_here(self) -> int:
        return self.shape[2] if self.stacked else self.shape[0]

    def _rows(self) -> Tensor:
        rows = torch.arange(self.shape[0]).view(-1, self.head)
        if self.every:
            return (torch.arange(rows.shape[0])[:, None] * self.every + self.start + rows[:1]).flatten()
        turned = rows[:, -self.rotated :]
        return torch.cat((rows[:, : -self.rotated], turned[:, 0::2], turned[:, 1::2]), dim=1).flatten()


def places_of(model: Model, layout: FamilyLayout, *, interleaved: bool = True) -> dict[str, TensorPlace]:
    """The place of every tensor of ``model`` by its name in a `Decoder`; with tied embeddings the head has none."""
    with torch.device("meta"):
        decoder = Decoder(model)
    outputs = {name: tensor.shape[0] for name, tensor in decoder.named_tensors()}
    return {
        name: _place(name, tuple(tensor.shape), model, layout, interleaved, outputs)
        for name, tensor in decoder.named_tensors()
    }


def _place(
    name: str, shape: tuple[int, ...], model: Model, layout: FamilyLayout, interleaved: bool, outputs: Mapping[str, int]
) -> TensorPlace:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        return TensorPlace(name, shape, (f"{_theirs(module, layout.outside, name)}.{kind}",))
    _, index, inner = name.split(".", 2)
    before = layout.layer.format(index)
    if ".experts." in inner:
        if layout.joined_experts:
            return _joined(name, shape, before + _theirs(inner, layout.inside, name), inner.rpartition(".")[2])
        theirs = f"{before}{_theirs(inner, layout.inside, name)}.weight"
        names = tuple(theirs.format(expert) for expert in range(shape[0]))
        return TensorPlace(name, shape, names, stacked=True, transposed=True)
    if inner in layout.inside:
        return TensorPlace(name, shape, (before + layout.inside[inner],))
    module, _, kind = inner.rpartition(".")
    start, whole, every = _part(name, module, layout, outputs, model)
    head, rotated = _rotated(module, model) if interleaved and module in layout.interleaved else (0, 0)
    names = (f"{before}{_theirs(module, layout.inside, name)}.{kind}",)
    transposed, head = module in layout.transposed and len(shape) == 2, model.head_size if every else head
    return TensorPlace(name, shape, names, False, transposed, start, whole, head, rotated, every)


def _joined(name: str, shape: tuple[int, ...], theirs: str, part: str) -> TensorPlace:
    """Gate, then up, make one tensor; down is another."""
    outputs = shape[2]
    start, whole = {"gate": (0, 2 * outputs), "up": (outputs, 2 * outputs)}.get(part, (0, outputs))
    return TensorPlace(name, shape, (theirs,), start=start, whole=whole, joined=True)


def _theirs(module: str, names: Mapping[str, str], name: str) -> str:
    if module not in names:
        raise SpecError(name, "has no place in a Hugging Face folder of this family", "keep it as our own checkpoint")
    return names[module]


def _part(
    name: str, module: str, layout: FamilyLayout, outputs: Mapping[str, int], model: Model
) -> tuple[int, int | None, int]:
    """Where a module's outputs begin in the fused ones, the number of fused outputs, and their number per head."""
    for fused in layout.fused:
        if module in fused:
            sizes = [outputs[name.replace(module, part)] for part in fused]
            at = fused.index(module)
            if layout.by_head:
                return at * model.head_size, sum(sizes), len(fused) * model.head_size
            return sum(sizes[:at]), sum(sizes), 0
    return 0, None, 0


def _rotated(module: str, model: Model) -> tuple[int, int]:
    assert model.mla
    before = model.mla.kv_rank if module == "attention.key_value_down" else model.mla.nope_dim
    return before + model.mla.rope_dim, model.mla.rope_dim


_OTHER_CONFIG = "use the config.json that belongs to these weights"


@dataclass(frozen=True)
class Naming:
    """What a Hugging Face family calls the tensors of one model."""

    model: Model  # with multi-token-prediction modules if the folder stores them, or will: not every family names them
    layout: FamilyLayout
    config: Mapping[str, Any]  # the content of config.json

    @classmethod
    def of_config(cls, config: Mapping[str, Any], model: Model | None = None, present: Collection[str] = ()) -> Naming:
        """Of a config.json and the tensors beside it; raises SpecError for a family whose weights are not read."""
        described, layout = model or model_from_hf_config(config), _layout_of(config)
        first = layout.layer.format(described.layers) + layout.inside.get("joined", "")
        modules = described.mtp_layers if f"{first}.weight" in present else 0
        if any(name.endswith(JOINED_EXPERTS) for name in present):
            layout = layout.with_joined_experts()
        return cls(replace(described, mtp_layers=modules), layout, config)

    @classmethod
    def of_model(cls, model: Model, source: Path | None = None) -> Naming:
        """Names of the first family that can express the model, or of the folder it came from (``source``)."""
        config = config_for(replace(model, mtp_layers=0), source)
        if config["model_type"] not in LAYOUTS:
            problem = f"weights of the family {config['model_type']} are not written"
            raise SpecError("model", problem, f"written are {', '.join(LAYOUTS)}")
        naming = cls.of_config(config, model)
        if model.mtp_layers == 0 or "joined" not in naming.layout.inside:
            return naming
        return cls(model, naming.layout, {**config, "num_nextn_predict_layers": model.mtp_layers})

    def copies(self, name: str) -> tuple[str, ...]:
        """Where a stored prediction module repeats a tensor of the model: each has the embedding and the head."""
        ours = {"embedding.weight": "embed_tokens.weight", "head.weight": "shared_head.head.weight"}
        if self.model.tied_embeddings:
            ours = {"embedding.weight": "embed_tokens.weight"}
        modules = range(self.model.layers, self.model.layers + self.model.mtp_layers)
        return tuple(self.layout.layer.format(index) + ours[name] for index in modules if name in ours)

    @cached_property
    def places(self) -> dict[str, TensorPlace]:
        return places_of(self.model, self.layout, interleaved=self.config.get("rope_interleave") is not False)

    def stored_name(self, theirs: str, present: Collection[str]) -> str:
        """The published GPT-2 leaves out the prefix that the library writes."""
        bare = theirs.removeprefix(self.layout.prefix)
        return bare if theirs not in present and bare in present else theirs

    def check(self, present: Collection[str], where: str) -> None:
        """Raises SpecError for the first tensor that is missing or that no decoder of this model has."""
        needed = {self.stored_name(name, present): name for place in self.places.values() for name in place.names}
        for stored, theirs in needed.items():
            if stored not in present:
                raise SpecError(theirs, f"is missing in {where}", f"complete the download, or {_OTHER_CONFIG}")
        for stored in sorted(set(present) - needed.keys()):
            if "weight_scale" in stored:
                raise SpecError(stored, "is the scale of quantised weights", "convert the checkpoint to bf16 first")
            if not self._may_be_ignored(stored):
                problem = f"in {where} belongs to no part of {self.model.name} as config.json describes it"
                raise SpecError(stored, problem, _OTHER_CONFIG)

    def _may_be_ignored(self, stored: str) -> bool:
        """Whether a stored tensor may be ignored: a constant, a tied head, or of a multi-token-prediction module."""
        if stored.endswith(self.layout.ignored):
            return True
        if stored == "lm_head.weight":
            return self.model.tied_embeddings
        before = self.layout.layer.split("{}")[0]
        index = stored.removeprefix(before).split(".")[0] if stored.startswith(before) else ""
        predicts = bool(self.config.get("num_nextn_predict_layers", 0))
        return predicts and index.isdigit() and int(index) >= self.model.layers


def _layout_of(config: Mapping[str, Any]) -> FamilyLayout:
    model_type = config.get("model_type")
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    what = "a part of a larger model" if isinstance(config.get("text_config"), dict) else shown(model_type)
    raise SpecError("model_type", f"the weights of {what} are not read", f"use one of {', '.join(LAYOUTS)}")
