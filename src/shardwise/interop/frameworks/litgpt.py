"""LitGPT: the YAML of ``litgpt finetune`` and ``litgpt pretrain``. It is read, not written."""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

_PRECISIONS = {"bf16-true": "bf16", "16-true": "fp16", "bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32",
               "transformer-engine": "fp8"}  # fmt: skip
_BASES = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4-double",
          "bnb.int8-training": "int8", "bnb.int8": "int8"}  # fmt: skip
_TARGETS = {"lora_query": "q_proj", "lora_key": "k_proj", "lora_value": "v_proj", "lora_projection": "o_proj",
            "lora_mlp": "mlp"}  # fmt: skip
_ON = ("lora_query", "lora_value")  # where nothing is said (finetune/lora.py)
# Its own model: a loss on 16-bit logits, one product for queries, keys and values (model.py, lora.py); every process
# loads the base (finetune/lora.py).
_STACK = {"stack.loss": "whole", "stack.joined_projections": True, "stack.loads_whole": True,
          "stack.accumulation": "local"}  # fmt: skip


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    pretrains = reading.has("model_name") or reading.section("model_config")
    _read_model(reading, fields, "model_name" if pretrains else "checkpoint_dir")
    fields.update({"strategy.tp": 1, "strategy.cp": 1, "training.task": "pretrain" if pretrains else "sft", **_STACK})
    _read_devices(reading)
    fields["strategy.zero"] = 0 if reading.devices == 1 else 3
    length = reading.count("train.max_seq_length", None)
    if length is not None:
        fields["training.seq"] = length
    elif not pretrains:
        reading.notes.append("train.max_seq_length is not set: no sample is cut; training.seq is the length to price")
    if not pretrains:
        recipes.note_lengths(reading, packed=False, tokens=length)
    fields["training.global_batch"] = reading.count("train.global_batch_size", 512 if pretrains else 16)
    fields["strategy.microbatch"] = reading.count("train.micro_batch_size", 4 if pretrains else 1)
    _read_optimizer(reading, fields, pretrains=pretrains)
    _read_method(reading, fields, pretrains=pretrains)
    words = reading.text("precision", "bf16-true")
    fields["training.precision"] = reading.choice("precision", _PRECISIONS, "bf16")
    if words == "bf16-true":
        recipes.keep_all_in_16_bit(fields)
    if not pretrains and fields["strategy.zero"] == 3:
        fields["strategy.recompute"] = "full"  # of every block on several devices (finetune/full.py, lora.py)


def _read_model(reading: Reading, fields: dict[str, Any], key: str) -> None:
    named = reading.text(key)
    if named is None:
        raise SpecError(key, "is missing", "name the model")
    recipes.read_model_called(reading, fields, key, "/".join(named.rstrip("/").split("/")[-2:]))


def _read_devices(reading: Reading) -> None:
    """``devices: auto`` is all that are there."""
    nodes = reading.count("num_nodes", 1)
    if reading.has("devices"):
        reading.devices = nodes * reading.count("devices")
    reading.used.add("devices")
    if reading.devices is not None and reading.cluster is not None and reading.devices != reading.cluster.devices:
        problem = f"{reading.devices} on {nodes} nodes, but the cluster has {reading.cluster.devices} devices"
        raise SpecError("devices", problem, f"use ⟨gpus={reading.devices}⟩")


def _read_optimizer(reading: Reading, fields: dict[str, Any], *, pretrains: bool) -> None:
    word = str(reading.value("optimizer.class_path", reading.value("optimizer", "AdamW"))).rpartition(".")[2].lower()
    fields["training.optimizer"] = recipes.OPTIMIZERS.get(word, "adamw")
    if word not in recipes.OPTIMIZERS:
        reading.notes.append(f"optimizer {word}: priced as AdamW")
    fields["stack.adamw"] = "in place" if pretrains else "foreach"  # fused where pretrain.py makes it
    keys = {"learning_rate": "optimizer.init_args.lr", "decay": "optimizer.init_args.weight_decay",
            "clip_norm": "train.max_norm"}  # fmt: skip
    recipes.read_learning(reading, fields, keys)
    tokens = reading.number("train.max_tokens", None)
    if tokens is not None:
        fields["training.tokens"] = int(tokens)
    else:
        recipes.read_steps(reading, fields, "train.max_steps")


def _read_method(reading: Reading, fields: dict[str, Any], *, pretrains: bool) -> None:
    adapted = not pretrains and any(reading.has(key) for key in ("lora_r", "lora_alpha", *_TARGETS))
    base = reading.text("quantize")
    if not adapted:
        if base:
            reading.notes.append("quantize without adapters: the base is priced in 16 bits")
        return
    if base is not None and reading.devices not in (None, 1):
        raise SpecError("quantize", "is not run on several devices by LitGPT", "use ⟨gpus=1⟩, or leave it out")
    if base is not None and base not in _BASES:
        raise SpecError("quantize", f"{shown(base)} is not understood", f"use one of {', '.join(_BASES)}")
    targets = [name for key, name in _TARGETS.items() if reading.flag(key, key in _ON)]
    if not targets:
        raise SpecError("lora_query", "no layer has adapters", "switch one of lora_query, lora_mlp, ... on")
    fields.update({
        "training.adapters.rank": reading.count("lora_r", 8),
        "training.adapters.alpha": float(reading.number("lora_alpha", 16)),
        "training.adapters.dropout": float(reading.number("lora_dropout", 0.05)),
        "training.adapters.targets": targets,
        **({"training.base_precision": _BASES[base]} if base else {}),
    })  # fmt: skip
    if reading.flag("lora_head"):
        reading.notes.append("lora_head: an adapter on the head is not priced")


LITGPT = recipes.reader(
    "litgpt",
    "LitGPT",
    _interpret,
    signature=("train.micro_batch_size",),
    programs=("litgpt",),
    stacks=("pytorch",),
    learning=("optimizer.init_args", "train.max_norm", "train.min_lr"),
    moves=(
        Move({"precision": "bf16-mixed"}, lambda job: job.training.precision == "fp32"),
        Move({"quantize": "bnb.nf4"}, lambda job: recipes.has_adapters(job) and not recipes.has_replicas(job)),
    ),
    microbatch_key="train.micro_batch_size",
)
