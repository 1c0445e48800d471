"""TRL and the alignment handbook: the YAML of ``trl sft --config`` and of its recipes. It is read, not written.

How a run is sharded is in the configuration that ``accelerate launch`` takes, and not in these files.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

_LEARNING = {"learning_rate": "learning_rate", "decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
             "epsilon": "adam_epsilon", "clip_norm": "max_grad_norm", "kind": "lr_scheduler_type"}  # fmt: skip
# Keys of one trainer alone.
_OF_DPO = ("beta", "max_prompt_length", "precompute_ref_log_probs", "ref_model_init_kwargs", "rpo_alpha")
_OF_GRPO = ("num_generations", "max_completion_length", "reward_funcs")
# Names of before May 2026, when the loss became chunked by default (b58947c7e).
_OLD = ("torch_dtype", "max_seq_length", "dataset_mixer", "dataset_mixture", "overwrite_output_dir")
_FORMATS = ("auto", "bfloat16", "float16", "float32")
_LOSSES = {"nll": "plain", "chunked_nll": "pieces", "dft": "plain"}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_model(reading, fields, "model_name_or_path")
    old = any(reading.section(name) for name in _OLD)
    fields["stack"] = "trl@2025" if old else "trl"
    preferences = any(reading.section(name) for name in _OF_DPO)
    fields["training.task"] = "dpo" if preferences else "sft"
    if any([reading.section(name) for name in _OF_GRPO]):  # noqa: C419 (each is read)
        reading.notes.append("only the update of the policy is priced: generation and rewards take longer")
        fields["training.task"] = "sft"
    fields["training.seq"] = reading.count("max_length", reading.count("max_seq_length", 1024))
    fields.update({"strategy.tp": 1, "strategy.cp": 1, "strategy.zero": 0})
    if "strategy.zero" not in reading.given:
        reading.notes.append("how the run is sharded is in Accelerate's file: strategy.zero is 3 for FSDP and ZeRO-3")
    recipes.read_batch(
        reading, fields, "per_device_train_batch_size", "gradient_accumulation_steps", usual=8
    )  # transformers' default
    packed = reading.flag("packing") or reading.flag("padding_free")
    recipes.note_lengths(reading, packed=packed, tokens=fields["training.seq"])
    recipes.read_optimizer(reading, fields, "optim", "adamw_torch_fused")
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "max_steps")
    _read_precision(reading, fields, old=old)
    if reading.flag("gradient_checkpointing", not old):
        fields["strategy.recompute"] = "full"
    if reading.flag("activation_offloading"):
        fields["strategy.offload.activations"] = 1.0
    _read_kernels(reading, fields)
    weights = str(reading.settings.get("dtype", reading.settings.get("torch_dtype", "float32")))
    reading.used |= {"dtype", "torch_dtype"}
    if weights not in _FORMATS:
        raise SpecError("dtype", f"{shown(weights)} is not understood", f"use one of {', '.join(_FORMATS)}")
    in_16_bit = weights in ("bfloat16", "float16", "auto")
    _read_adapters(reading, fields, loaded=16 if in_16_bit else None)
    if "training.adapters.rank" not in fields and in_16_bit:
        recipes.keep_all_in_16_bit(fields)


def _read_precision(reading: Reading, fields: dict[str, Any], *, old: bool) -> None:
    half = reading.flag("fp16")
    bf16 = reading.flag("bf16", not half and not old)
    fields["training.precision"] = "bf16" if bf16 else "fp16" if half else "fp32"


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_attention(reading, fields, "attn_implementation")
    if reading.flag("use_liger_kernel") or reading.flag("use_liger_loss"):
        fields.update({**recipes.LIGER, **recipes.LOSS_IN_PIECES})
    if (loss := str(reading.value("loss_type"))) in _LOSSES:
        fields["stack.loss"] = _LOSSES[loss]
    if recipes.is_on(reading, "torch_compile"):
        fields.update({"training.compile": True, "stack.elementwise": "compiled"})


def _read_adapters(reading: Reading, fields: dict[str, Any], *, loaded: int | None) -> None:
    four, eight = reading.flag("load_in_4bit"), reading.flag("load_in_8bit")
    nested = reading.flag("use_bnb_nested_quant")
    if not reading.flag("use_peft"):
        if four or eight:
            reading.notes.append("weights in few bits are trained only by adapters: the base is priced in 16 bits")
        return
    named = reading.value("lora_target_modules")
    fields.update({
        "training.adapters.rank": reading.count("lora_r", 16),
        "training.adapters.alpha": float(reading.number("lora_alpha", 32)),
        "training.adapters.dropout": float(reading.number("lora_dropout", 0.05)),
        "training.adapters.method": "dora" if reading.flag("use_dora") else "lora",
        "training.adapters.scaling": "rank-stabilised" if reading.flag("use_rslora") else "standard",
        # PEFT's own choice for most families where none is made (utils/constants.py).
        "training.adapters.targets": recipes.targets_of(reading, "lora_target_modules", named or ["q_proj", "v_proj"]),
    })  # fmt: skip
    recipes.read_base(fields, bits=4 if four else 8 if eight else loaded, double=nested)
    recipes.read_saved_modules(reading, fields, "lora_modules_to_save")


TRL = recipes.reader(
    "trl",
    "TRL",
    _interpret,
    signature=("max_seq_length", "max_length", "use_peft", "dataset_mixture", "dataset_mixer", "dataset_name"),
    programs=("trl",),
    stacks=("trl",),
    learning=("learning_rate", "weight_decay", "adam_", "max_grad_norm", "lr_scheduler", "num_train_epochs"),
    moves=(
        Move({"gradient_checkpointing": True}),
        Move({"gradient_checkpointing": False}),
        Move({"gradient_checkpointing": True, "activation_offloading": True}),
        Move({"load_in_4bit": True, "load_in_8bit": None}, recipes.has_adapters),
        recipes.in_bf16(),
    ),
    microbatch_key="per_device_train_batch_size",
    accumulation_key="gradient_accumulation_steps",
)
