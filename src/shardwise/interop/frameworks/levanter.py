"""Levanter: the YAML of its ``train_lm`` and of its fine-tuning, on JAX. It is read, not written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.documents import YAML, Names, Settings
from shardwise.interop.frameworks.target import Reading
from shardwise.spec.errors import SpecError, shown

# Defaults of models/llama.py, mistral.py, mixtral.py and gpt2.py.
_LLAMA: Mapping[str, int] = {"seq_len": 2048, "hidden_dim": 4096, "intermediate_dim": 11_008, "num_layers": 32,
                             "num_heads": 32, "num_kv_heads": 32}  # fmt: skip
_MODELS: dict[str, Mapping[str, int]] = {
    "llama": _LLAMA, "mistral": {**_LLAMA, "seq_len": 8192, "intermediate_dim": 14_336, "num_kv_heads": 8},
    "mixtral": {**_LLAMA, "seq_len": 8192, "intermediate_dim": 14_336, "num_kv_heads": 8},
    "gpt2": {"seq_len": 1024, "hidden_dim": 768, "num_layers": 12, "num_heads": 12},
}  # fmt: skip
# Tokens of the tokenizers that its files name, by a part of the name.
_VOCABULARIES = {"llama-2": 32_000, "llama-3": 128_256, "llama_3": 128_256, "llama3": 128_256, "gpt-neox": 50_277,
                 "gpt2": 50_257, "gemma": 256_000, "mixtral": 32_000, "mistral": 32_000, "olmo-1b": 50_280,
                 "marin": 128_256, "olmo-2": 100_278}  # fmt: skip
_FORMATS = {"f32": "fp32", "float32": "fp32", "full": "fp32", "bfloat16": "bf16", "bf16": "bf16", "half": "bf16",
            "f16": "fp16", "float16": "fp16"}  # fmt: skip
_LEARNING = {"learning_rate": "optimizer.learning_rate", "decay": "optimizer.weight_decay", "beta1": "optimizer.beta1",
             "beta2": "optimizer.beta2", "epsilon": "optimizer.epsilon", "clip_norm": "optimizer.max_grad_norm",
             "kind": "optimizer.lr_schedule"}  # fmt: skip
_ATTENTION = {"vanilla": "unfused", "default": "flash", "nvte": "flash", "splash": "flash", "jax_flash": "flash"}
_SHARDED = "trainer.fsdp_axis"
_OF_TUNING = ("supervised_data", "chat_train_urls", "messages_field", "prompts", "model_name_or_path", "lora")
_UNPRICED = {
    "trainer.axis_resources": "another table of what is split over which axis is not read",
    "trainer.parameter_axis_resources": "another table of what is split over which axis is not read",
    "trainer.model_averaging": "an average of the weights is not priced, which takes memory",
}


def _parse(text: str, what: str, names: Names) -> Settings:
    settings = YAML.parse(re.sub(r"!include\s+(\S+)", r'"!include \1"', text), what, names)
    if settings.get(_SHARDED, "embed") is None:
        settings[_SHARDED] = ""  # an axis that no weight has
    return {key: value for key, value in settings.items() if value is not None}


def _read_included(reading: Reading) -> None:
    """Sections that are in other files; data change no price."""
    for section, value in list(reading.settings.items()):
        if not str(value).startswith("!include ") or section == "data":
            continue
        text = reading.beside(str(value).partition(" ")[2])
        reading.used.add(section)
        if text is None:
            reading.notes.append(f"{section} is in a file that is not beside this one, and is not read")
            continue
        for key, inner in _parse(text, section, LEVANTER.names).items():
            reading.settings.setdefault(f"{section}.{key}", inner)


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    _read_included(reading)
    kind = reading.text("model.type", "llama" if reading.section("model") else "")
    _read_model(reading, fields, kind)
    usual = _MODELS.get(kind, _LLAMA)["seq_len"]
    length = reading.count("model.seq_len", usual)
    fields["training.seq"] = reading.count("train_seq_len", reading.count("max_seq_len", length))
    # Each is read.
    tuned = [reading.section(name) for name in _OF_TUNING]
    fields["training.task"] = "sft" if any(tuned) else "pretrain"
    _read_layout(reading, fields)
    _read_precision(reading, fields)
    checkpointing = reading.value("model.gradient_checkpointing", True)
    if checkpointing not in (False, "none"):
        fields["strategy.recompute"] = "full"
        if "offload" in str(checkpointing):
            fields["strategy.offload.activations"] = 1.0
    fields["training.attention"] = reading.choice("model.attn_backend", _ATTENTION, "flash")
    if not reading.flag("model.use_flash_attention", True):
        fields["training.attention"] = "unfused"
    if reading.count("model.cross_entropy_block_size", None) is not None:
        fields.update(recipes.LOSS_IN_PIECES)
    drops = [reading.number(f"model.{name}_pdrop", 0.0) for name in ("embed", "resid", "attn")]
    fields["training.dropout"] = max(drops) > 0
    recipes.read_optimizer(reading, fields, "optimizer.type", "adam")
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "trainer.num_train_steps")
    if fields.get("stack.masters") == "none" and fields["training.optimizer"] == "adamw":
        fields["training.optimizer"] = "adamw-bf16-moments"
    _read_adapters(reading, fields)
    reading.notes.append("priced as MaxText runs the same: JAX and XLA, with kernels of its own")
    recipes.note(reading, _UNPRICED)


def _read_model(reading: Reading, fields: dict[str, Any], kind: str) -> None:
    """Of a checkpoint where one is started from, else by its sizes; the vocabulary is the tokenizer's."""
    keys = ("model_name_or_path", "initialize_from_hf")
    named = next((key for key in keys if isinstance(reading.settings.get(key), str)), None)
    reading.used.update(keys)
    whole = reading.flag("use_hf_model_config") or not reading.has("model.hidden_dim")
    if named is not None and whole:
        recipes.read_model_called(reading, fields, named, str(reading.settings[named]).partition("@")[0])
    elif reading.model is None and kind not in _MODELS:
        reading.no_model = f"model.type {shown(kind)} is not described by its sizes" if kind else "is not in the file"
    elif reading.model is None:
        fields.update({f"model.{name}": value for name, value in _model(reading, kind).items()})


def _model(reading: Reading, kind: str) -> dict[str, Any]:
    usual = _MODELS[kind]
    size = {name: reading.count(f"model.{name}", value) for name, value in usual.items()}
    gpt2 = kind == "gpt2"
    inner = size["hidden_dim"] * reading.count("model.mlp_scale", 4) if gpt2 else size["intermediate_dim"]
    biased = reading.flag("model.use_bias", gpt2)
    gated = {"silu": "swiglu", **dict.fromkeys(("gelu", "gelu_new", "quick_gelu"), "geglu")}
    plain = {**dict.fromkeys(("gelu", "gelu_new", "quick_gelu"), "gelu"), "relu": "relu"}
    usual_activation = "gelu" if gpt2 else "swiglu"
    tokenizer = str(reading.value("data.tokenizer", reading.value("tokenizer", "gpt2" if gpt2 else "llama-2"))).lower()
    vocab = next((tokens for part, tokens in _VOCABULARIES.items() if part in tokenizer), None)
    if vocab is None:
        vocab = 50_257 if gpt2 else 32_000
        reading.notes.append(f"tokenizer {shown(tokenizer)}: {vocab:,} tokens are assumed (model.vocab)")
    model = {
        "layers": size["num_layers"], "hidden": size["hidden_dim"], "heads": size["num_heads"], "ffn": inner,
        "kv_heads": size.get("num_kv_heads", size["num_heads"]), "vocab": vocab, "max_seq": size["seq_len"],
        "head_dim": reading.count("model.head_dim", None),
        "activation": reading.choice("model.activation_function", plain if gpt2 else gated, usual_activation),
        "norm_weight": reading.flag("model.use_layer_norm_weight", True), "norm": "layernorm" if gpt2 else "rmsnorm",
        "positions": "learned" if gpt2 else "rope",
        "tied_embeddings": reading.flag("model.tie_word_embeddings", gpt2), "qkv_bias": biased,
        "attention_out_bias": biased, "mlp_bias": biased,
        "norms_per_layer": 4 if reading.flag("model.hybrid_norm") else 2,
        "embedding_norm": reading.flag("model.input_embedding_norm"),
    }  # fmt: skip
    experts = {"experts": reading.count("model.n_routed_experts", 8), "ffn": inner,
               "top_k": reading.count("model.num_experts_per_tok", 2),
               "shared_ffn": reading.integer("model.n_shared_experts", 0) * inner}  # fmt: skip
    return {**model, **({"moe": experts} if kind == "mixtral" else {})}


def _read_layout(reading: Reading, fields: dict[str, Any]) -> None:
    tp = reading.count("trainer.model_axis_size", 1)
    fields.update({"strategy.tp": tp, "strategy.cp": 1, "strategy.sequence_parallel": False})
    sharded = bool(reading.value(_SHARDED, "embed"))
    fields["strategy.zero"] = 3 if sharded else 0
    replicas = reading.count("trainer.replica_ici_axis_size", 1) * reading.count("trainer.replica_dcn_axis_size", 1)
    ranks = reading.data_ranks(fields)
    if replicas > 1 and ranks is not None and sharded:
        fields["strategy.shard_group"] = ranks // replicas
    batch = reading.value("trainer.train_batch_size", 512)
    if isinstance(batch, list):
        last = batch[-1]
        batch = last.get("value") if isinstance(last, dict) else last
        reading.notes.append(f"trainer.train_batch_size is a schedule: priced at its last value, {batch}")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise SpecError("trainer.train_batch_size", f"{shown(batch)} is not a number of sequences", "write 512")
    fields["training.global_batch"] = batch
    size = reading.integer("trainer.per_device_parallelism", -1)
    if size > 0 or ranks is not None:
        fields["strategy.microbatch"] = size if size > 0 else max(1, batch // (ranks or 1))


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    """jmp's policies: ``p=f32,c=bfloat16``, or one format for all."""
    words = reading.text("trainer.mp", "f32")
    parts = dict(part.split("=", 1) for part in words.split(",") if "=" in part) or {"p": words, "c": words}
    kept = str(parts.get("p", parts.get("params", "f32")))
    computed = str(parts.get("c", parts.get("compute", kept)))
    for word in (kept, computed):
        if word not in _FORMATS:
            raise SpecError("trainer.mp", f"{shown(word)} is not understood", "write p=f32,c=bfloat16")
    fields["training.precision"] = _FORMATS[computed]
    if _FORMATS[kept] != "fp32":
        fields.update({"stack.masters": "none", "stack.sharded_parameters": "16-bit"})
    for section in ("trainer.quantization", "trainer.fp8"):
        if reading.flag(f"{section}.fp8") or reading.settings.get(section) is True:
            fields["training.precision"] = "fp8"
        reading.used.add(section)
    if reading.flag("trainer.quantization.int8"):
        fields["training.precision"] = "int8"


def _read_adapters(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.section("lora"):
        return
    named = reading.value("lora.target_modules", "all-linear")
    fields.update({
        "training.adapters.rank": reading.count("lora.r", 8),
        "training.adapters.alpha": float(reading.number("lora.alpha", 8.0)),
        "training.adapters.dropout": float(reading.number("lora.dropout", 0.0)),
        "training.adapters.targets": recipes.targets_of(reading, "lora.target_modules", named),
    })  # fmt: skip


LEVANTER = recipes.reader(
    "levanter", "Levanter", _interpret, format=replace(recipes.RECIPE, parse=_parse),
    signature=("trainer.mp", "trainer.train_batch_size", "trainer.model_axis_size"), stacks=("maxtext",),
    carries_model=True, learning=("optimizer.", "trainer.num_train_steps"),
)  # fmt: skip
