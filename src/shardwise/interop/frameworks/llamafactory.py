"""LLaMA-Factory: the YAML of ``llamafactory-cli train``, also that of its version 1. It is read, not written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.documents import Names, Settings
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

_LEARNING = {"learning_rate": "learning_rate", "decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
             "epsilon": "adam_epsilon", "clip_norm": "max_grad_norm", "kind": "lr_scheduler_type"}  # fmt: skip
_TASKS = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "rm": "sft", "kto": "sft", "ppo": "sft"}
_NOTES = {
    "rm": "a reward model has a head of one output: priced with that of the language model",
    "kto": "priced as supervised training: no frozen reference",
    "ppo": "only the update of the policy is priced: generation, reward and value models take more",
}
# A preference loss without a frozen reference (hparams/finetuning_args.py, use_ref_model).
_WITHOUT_REFERENCE = ("orpo", "simpo")


# What version 1 calls the same (src/llamafactory/v1/config); its plugins have sections of their own.
_IN_VERSION_1 = {
    "model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size", "peft_config.r": "lora_rank",
    "peft_config.lora_alpha": "lora_alpha", "peft_config.lora_dropout": "lora_dropout",
    "peft_config.target_modules": "lora_target", "peft_config.name": "finetuning_type",
    "peft_config.freeze_trainable_layers": "freeze_trainable_layers",
    "peft_config.freeze_trainable_modules": "freeze_trainable_modules",
    "quant_config.quantization_bit": "quantization_bit", "optim_config.name": "optim",
    "lr_scheduler_config.name": "lr_scheduler_type", "dist_config.config_file": "deepspeed",
}  # fmt: skip

_OF_VERSION_1 = ("model_class", "cutoff_len", "train_dataset")


def _parse(text: str, what: str, names: Names) -> Settings:
    """Settings of version 1 by the names that the others have, with its defaults."""
    settings = recipes.RECIPE.parse(text, what, names)
    if "model" not in settings or not any(key in settings for key in _OF_VERSION_1):
        return settings
    usual: Settings = {"finetuning_type": "full", "bf16": True, "per_device_train_batch_size": 1}
    if settings.get("dist_config.name") == "fsdp2":
        usual |= {"fsdp": "full_shard", "fsdp_config.version": 2}
    if settings.get("enable_activation_checkpointing") is False:
        usual["disable_gradient_checkpointing"] = True
    return {**usual, **{_IN_VERSION_1.get(key, key): value for key, value in settings.items()}}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.flag("do_train", True):
        raise SpecError("do_train", "false: this recipe trains nothing", "give one that trains")
    recipes.read_model(reading, fields, "model_name_or_path")
    fields["training.seq"] = reading.count("cutoff_len", 2048)
    cp = reading.count("cp_size", 1)
    fields.update({"strategy.tp": 1, "strategy.cp": cp, "strategy.zero": 0})
    if cp > 1:
        fields["strategy.context_method"] = "ulysses"  # its only one
    _read_task(reading, fields)
    _read_precision(reading, fields)
    if reading.has("deepspeed"):
        recipes.read_deepspeed(reading, fields, "deepspeed")
    elif reading.has("fsdp"):
        words = str(reading.value("fsdp")).split()
        recipes.read_fsdp(reading, fields, "fsdp_config", reading.count("fsdp_config.version", 1))
        fields["strategy.zero"] = 2 if "shard_grad_op" in words else fields["strategy.zero"]
    recipes.read_batch(
        reading, fields, "per_device_train_batch_size", "gradient_accumulation_steps", usual=8
    )  # transformers' default
    if (batch := reading.count("global_batch_size", None)) is not None:
        fields["training.global_batch"] = batch
    packed = reading.flag("packing", fields["training.task"] == "pretrain") or reading.flag("neat_packing")
    if fields["training.task"] != "pretrain":
        recipes.note_lengths(reading, packed=packed, tokens=fields["training.seq"])
    recipes.read_optimizer(reading, fields, "optim", "adamw_torch_fused")
    if reading.flag("use_muon"):
        fields["training.optimizer"] = "muon"
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "max_steps")
    # Checkpointing is on unless it is switched off (model/model_utils/checkpointing.py).
    off = reading.flag("disable_gradient_checkpointing")
    fields["strategy.recompute"] = "none" if off else "full"
    _read_kernels(reading, fields)
    _read_method(reading, fields)


def _read_task(reading: Reading, fields: dict[str, Any]) -> None:
    stage = str(reading.value("stage", "sft")).lower()
    if stage not in _TASKS:
        raise SpecError("stage", f"{shown(stage)} is not a stage", f"use one of {', '.join(_TASKS)}")
    fields["training.task"] = _TASKS[stage]
    if stage in _NOTES:
        reading.notes.append(f"stage {stage}: {_NOTES[stage]}")
    if stage == "dpo" and str(reading.value("pref_loss", "sigmoid")).lower() in _WITHOUT_REFERENCE:
        fields["training.task"] = "sft"
        reading.notes.append("pref_loss without a frozen reference: both answers are priced as one batch")


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    pure = reading.flag("pure_bf16")
    half = reading.flag("bf16") or pure
    fields["training.precision"] = "bf16" if half else "fp16" if reading.flag("fp16") else "fp32"
    if reading.flag("fp8"):
        fields["training.precision"] = "fp8"


def _read_method(reading: Reading, fields: dict[str, Any]) -> None:
    word = str(reading.value("finetuning_type", "lora")).lower()
    bits = reading.integer("quantization_bit", None)
    if word == "full":
        if reading.flag("pure_bf16") and fields["strategy.zero"] == 0:
            recipes.keep_all_in_16_bit(fields)
        return
    if word == "freeze":
        _read_freeze(reading, fields)
        return
    if word != "lora":
        raise SpecError("finetuning_type", f"{shown(word)} is not priced", "priced are lora, freeze and full")
    rank = reading.count("lora_rank", 8)
    fields.update({
        "training.adapters.rank": rank,
        "training.adapters.alpha": float(reading.number("lora_alpha", 2 * rank)),
        "training.adapters.dropout": float(reading.number("lora_dropout", 0.0)),
        "training.adapters.method": "dora" if reading.flag("use_dora") else "lora",
        "training.adapters.scaling": "rank-stabilised" if reading.flag("use_rslora") else "standard",
        "training.adapters.targets": recipes.targets_of(reading, "lora_target", reading.value("lora_target", "all")),
    })  # fmt: skip
    if bits not in (None, 4, 8):
        reading.notes.append(f"quantization_bit {bits}: a base in 4 bits is priced")
    if reading.text("quantization_method", "bnb").lower() not in ("bnb", "bitsandbytes"):
        reading.notes.append("quantization_method: priced as bitsandbytes of as many bits")
    double = reading.flag("double_quantization", True)
    loaded = 16 if fields["training.precision"] != "fp32" else None
    recipes.read_base(fields, bits=loaded if bits is None else 8 if bits == 8 else 4, double=double)
    if reading.flag("use_unsloth"):
        fields.update({"stack.adapters": "fused", "stack.norms": "fused", "stack.loss": "pieces"})
    recipes.read_saved_modules(reading, fields, "additional_target")


def _read_freeze(reading: Reading, fields: dict[str, Any]) -> None:
    """The last layers are trained, or the first where the number is below zero."""
    model = recipes.model_of(reading, fields)
    number = reading.integer("freeze_trainable_layers", 2)
    reading.value("freeze_trainable_modules")
    if model is None or abs(number) > model.layers:
        reading.notes.append("freeze_trainable_layers: priced as if all weights were trained, an upper bound")
        return
    first = model.layers - number if number > 0 else 0
    fields["training.trained"] = [f"layers.{first}-{first + abs(number) - 1}"]


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_attention(reading, fields, "flash_attn")
    if reading.flag("enable_liger_kernel"):
        fields.update({**recipes.LIGER, **recipes.LOSS_IN_PIECES})


LLAMAFACTORY = recipes.reader(
    "llamafactory",
    "LLaMA-Factory",
    _interpret,
    format=replace(recipes.RECIPE, parse=_parse),
    signature=("finetuning_type", "cutoff_len"),
    programs=("llamafactory-cli", "llamafactory"),
    stacks=("accelerate", "deepspeed"),
    learning=("learning_rate", "weight_decay", "adam_", "max_grad_norm", "lr_scheduler", "num_train_epochs"),
    moves=(
        Move({"disable_gradient_checkpointing": True}),
        Move({"disable_gradient_checkpointing": None}),
        Move({"quantization_bit": 4}, recipes.has_adapters),
        recipes.in_bf16(),
        # Its own files (examples/deepspeed).
        *recipes.by_deepspeed(
            *(f"examples/deepspeed/ds_{name}_config.json" for name in ("z2", "z3", "z2_offload", "z3_offload"))
        ),
    ),
    other_dialect=("model_class", "train_dataset", "dist_config.name", "quant_config.name"),  # version 1
    microbatch_key="per_device_train_batch_size",
    accumulation_key="gradient_accumulation_steps",
)
