"""Tables of patterns for classes of Hugging Face `transformers` (5.x), and the job of a network so described.

Entries of a supplied table that a network does not have are left out (a dense model has no experts); every entry of a
user's own table has to match.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from shardwise.engine.patterns import Patterns, find_layers, matching
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

_LAYER = "model.layers.*"
_SHARED = f"{_LAYER}.mlp.shared_expert"
_HUGGING_FACE = Patterns(
    layers=_LAYER,
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    regions=(f"{_LAYER}.self_attn", f"{_LAYER}.mlp", _SHARED),
    columns={
        f"{_LAYER}.self_attn.q_proj": "",
        f"{_LAYER}.self_attn.k_proj": "key_value_heads",
        f"{_LAYER}.self_attn.v_proj": "key_value_heads",
        f"{_LAYER}.mlp.gate_proj": "",
        f"{_LAYER}.mlp.up_proj": "",
        f"{_SHARED}.gate_proj": "",
        f"{_SHARED}.up_proj": "",
    },
    rows=(f"{_LAYER}.self_attn.o_proj", f"{_LAYER}.mlp.down_proj", f"{_SHARED}.down_proj"),
    flat=(_SHARED,),
    experts=f"{_LAYER}.mlp.experts",
    expert_features={"gate_up_proj": (1, 2), "down_proj": (2, 1)},
    attention=f"{_LAYER}.self_attn",
    hidden="hidden_states",
    positions="position_ids",
    documents="documents",
    constants={"use_cache": False},
)

_OLMO_2 = replace(
    _HUGGING_FACE,
    wide_norms={f"{_LAYER}.self_attn.q_norm": "", f"{_LAYER}.self_attn.k_norm": "key_value_heads"},
)
_PHI = replace(
    _HUGGING_FACE,
    norm="model.final_layernorm",
    columns={**_HUGGING_FACE.columns, f"{_LAYER}.mlp.fc1": ""},
    rows=(f"{_LAYER}.self_attn.dense", f"{_LAYER}.mlp.fc2"),
)
_NEOX = "gpt_neox.layers.*"
_GPT_NEOX = replace(
    _HUGGING_FACE,
    layers=_NEOX,
    embedding="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    regions=(f"{_NEOX}.attention", f"{_NEOX}.mlp"),
    columns={f"{_NEOX}.attention.query_key_value": "", f"{_NEOX}.mlp.dense_h_to_4h": ""},  # fused, head by head
    rows=(f"{_NEOX}.attention.dense", f"{_NEOX}.mlp.dense_4h_to_h"),
    attention=f"{_NEOX}.attention",
)
_PHI_3 = replace(
    _HUGGING_FACE,
    columns={},
    fused={
        f"{_LAYER}.self_attn.qkv_proj": ("heads", "key_value_heads", "key_value_heads"),
        f"{_LAYER}.mlp.gate_up_proj": ("ffn", "ffn"),
    },
    divided={f"{_LAYER}.self_attn": ("num_key_value_heads", "config.num_attention_heads")},
)
_GEMMA = replace(_HUGGING_FACE, logit_cap="final_logit_softcapping", layer_lists=("model.config.layer_types",))
_GPT = "transformer.h.*"
_GPT_2 = replace(
    _HUGGING_FACE,
    layers=_GPT,
    embedding="transformer.wte",
    position_embedding="transformer.wpe",
    norm="transformer.ln_f",
    regions=(f"{_GPT}.attn", f"{_GPT}.mlp"),
    columns={f"{_GPT}.mlp.c_fc": ""},
    fused={f"{_GPT}.attn.c_attn": ("heads", "heads", "heads")},
    rows=(f"{_GPT}.attn.c_proj", f"{_GPT}.mlp.c_proj"),
    attention=f"{_GPT}.attn",
    divided={f"{_GPT}.attn": ("split_size",)},
    refused={
        "sequence_parallel": "views the hidden states behind its last norm as whole sequences",
        "pp": "reshapes its input as token ids, where later stages pass hidden states",
    },
)

_LIKE_LLAMA = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Olmo", "Gemma")
SUPPLIED = {f"{name}ForCausalLM": _HUGGING_FACE for name in _LIKE_LLAMA} | {
    "Olmo2ForCausalLM": _OLMO_2,
    "PhiForCausalLM": _PHI,
    "Phi3ForCausalLM": _PHI_3,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "GPT2LMHeadModel": _GPT_2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
}


def supplied_table(module: nn.Module) -> Patterns | None:
    """The table of a known class, without what this network does not have."""
    if type(module).__name__ not in SUPPLIED or not is_hugging_face(module):
        return None
    table = SUPPLIED[type(module).__name__]
    there = partial(matches, module)
    return replace(
        table,
        columns={pattern: heads for pattern, heads in table.columns.items() if there(pattern)},
        rows=tuple(filter(there, table.rows)),
        regions=tuple(filter(there, table.regions)),
        flat=tuple(filter(there, table.flat)),
        experts=table.experts if there(table.experts) else "",
    )


def found_layers(module: nn.Module) -> Patterns:
    """The blocks of a network without a table, which data parallelism and recompute treat one by one."""
    blocks = {id(block) for block in find_layers(module)}
    names = [name for name, part in module.named_modules() if id(part) in blocks]
    layers = f"{names[0].rpartition('.')[0]}.*".lstrip(".") if names else ""
    return Patterns(layers=layers, embedding="", norm="", head="", regions=())


def is_hugging_face(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def matches(module: nn.Module, pattern: str) -> bool:
    return next(matching(module, pattern), None) is not None


def job_for(module: nn.Module, strategy: Strategy, training: Training | None, world: int) -> Job:
    """The job of a network, on ``world`` processes of a laptop."""
    training = training or Training(precision="fp32")
    model = described(module)
    if model is None:  # data parallelism, precision and recompute need only the number of layers
        layers = max(1, len(find_layers(module)))
        model = Model(layers=layers, hidden=1, heads=1, ffn=1, vocab=1, name=type(module).__name__)
    # The module itself limits how long its sequences may be.
    model = replace(model, max_seq=max(model.max_seq, training.seq), published_parameters=None)
    cluster = cluster_from(f"laptop:{world}")
    return Job(model=model, cluster=cluster, strategy=strategy, training=training)


def described(module: nn.Module) -> Model | None:
    """A network's description of itself; None if it has none, or one that no `Model` can express."""
    try:
        return read_description(module)
    except SpecError:
        return None


def read_description(module: nn.Module) -> Model | None:
    """What a Hugging Face network's config says; raises SpecError for what no `Model` can express."""
    config: Any = getattr(module, "config", None)
    if not is_hugging_face(module) or not hasattr(config, "to_dict"):
        return None
    return model_from_hf_config(config.to_dict())
