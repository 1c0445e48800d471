"""torchtune: the YAML that ``tune run`` reads. It is read, not written."""

from __future__ import annotations

import re
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

_BUILDER = "model._component_"
# A size in the names of its builders, which the module that they are in begins: qwen2_5.lora_qwen2_5_1_5b_instruct.
_SIZE = re.compile(r"(\d+(?:_\d+)?[bm])(?:_\w+)?")
_NAMED = {"phi3_mini": "phi3-mini", "phi4_14b": "phi4", "llama4_scout_17b_16e": "llama4-scout",
          "llama4_maverick_17b_128e": "llama4-maverick"}  # fmt: skip
_OPTIMIZERS = {"adamw": "adamw", "pagedadamw": "adamw", "pagedadamw8bit": "adam8bit", "adamw8bit": "adam8bit",
               "adam8bit": "adam8bit", "sgd": "sgd", "adam": "adamw"}  # fmt: skip
_PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_IN_PARTS = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
_ELSE = {"teacher_model": "a teacher, whose weights and passes are not priced",
         "reward_and_value_model": "reward and value models, which are not priced",
         "orchestration": "generation on other devices, which is not priced",
         "quantizer": "weights and activations that are rounded, which takes longer than is priced"}  # fmt: skip


def model_name(builder: str) -> tuple[str, str]:
    """The method in the name of a builder (`lora`, `qlora` or nothing), and a preset's name."""
    *_, module, name = builder.split(".")
    method, _, rest = name.partition("_")
    if method not in ("lora", "qlora"):
        method, rest = "", name
    size = _SIZE.fullmatch(rest.removeprefix(f"{module}_"))
    if rest in _NAMED or size is None:
        return method, _NAMED.get(rest, rest)
    return method, f"{module.replace('_', '.')}-{size[1].replace('_', '.')}"


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    builder = reading.text(_BUILDER, reading.text("policy_model._component_"))
    if builder is None or "torchtune" not in builder:
        raise SpecError(_BUILDER, f"{shown(builder)} builds no model of torchtune", "name one: torchtune.models...")
    method, name = model_name(builder)
    recipes.read_model_called(reading, fields, _BUILDER, name)
    _read_length(reading, fields)
    fields["training.task"] = "dpo" if "DPOLoss" in str(reading.value("loss._component_", "")) else "sft"
    tp, cp = reading.count("tensor_parallel_dim", 1), reading.count("context_parallel_dim", 1)
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.zero": 3, "training.attention": "flash"})
    if tp > 1:
        fields["strategy.sequence_parallel"] = False
    if cp > 1:
        fields["strategy.context_method"] = "ring"
    replicas = reading.integer("data_parallel_replicate_dim", 1)
    shards = reading.integer("data_parallel_shard_dim", -1)
    if shards > 0:
        fields["strategy.dp"] = replicas * shards
        if replicas > 1:
            fields["strategy.shard_group"] = shards * cp
    recipes.read_batch(reading, fields, "batch_size", "gradient_accumulation_steps", usual=1)
    _read_optimizer(reading, fields)
    _read_kernels(reading, fields)
    _read_adapters(reading, fields, method)
    fields["training.precision"] = reading.choice("dtype", {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16"}, "bf16")
    if fields["training.precision"] != "fp32":
        recipes.keep_all_in_16_bit(fields)
    if reading.flag("enable_activation_checkpointing"):
        fields["strategy.recompute"] = "full"
    if reading.flag("enable_activation_offloading"):
        fields["strategy.offload.activations"] = 1.0
    if reading.flag("fsdp_cpu_offload") or reading.flag("fsdp.cpu_offload"):
        fields.update({f"strategy.offload.{part}": 1.0 for part in ("weights", "gradients", "optimizer")})
    for section, words in _ELSE.items():
        if reading.section(section):
            reading.notes.append(f"{section}: {words}")


def _read_length(reading: Reading, fields: dict[str, Any]) -> None:
    length = reading.count("tokenizer.max_seq_len", reading.count("dataset.max_seq_len", None))
    packed = reading.flag("dataset.packed")
    if length is None:
        reading.notes.append("tokenizer.max_seq_len is not set: no sample is cut; training.seq is the length to price")
    else:
        fields["training.seq"] = length
    recipes.note_lengths(reading, packed=packed, tokens=length)


def _read_optimizer(reading: Reading, fields: dict[str, Any]) -> None:
    component = str(reading.value("optimizer._component_", "torch.optim.AdamW"))
    word = component.rpartition(".")[2].lower()
    fields["training.optimizer"] = _OPTIMIZERS.get(word, "adamw")
    if word not in _OPTIMIZERS:
        reading.notes.append(f"optimizer {component}: priced as AdamW")
    if "paged" in word:
        reading.notes.append(f"optimizer {component}: states that leave for the host are priced on the device")
    # torch's choice where none is made, on FSDP2's parameters
    torch = word == "adamw" and not reading.flag("optimizer.fused")
    fields["stack.adamw"] = "foreach unsharded" if torch else "in place"
    if reading.flag("optimizer_in_bwd"):
        reading.notes.append("optimizer_in_bwd: gradients leave within the backward pass: memory is an upper bound")
    keys = {"learning_rate": "optimizer.lr", "decay": "optimizer.weight_decay", "clip_norm": "clip_grad_norm"}
    recipes.read_learning(reading, fields, keys)
    recipes.read_steps(reading, fields, "max_steps_per_epoch")


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    if recipes.is_on(reading, "compile"):
        fields.update({"stack": "pytorch-compiled", "training.compile": True})
    if str(reading.value("loss._component_", "")).endswith(_IN_PARTS):
        fields["stack.loss"] = "fused"  # a part's gradient takes the place of its 16-bit logits


def _read_adapters(reading: Reading, fields: dict[str, Any], method: str) -> None:
    base = method == "qlora" or reading.flag("model.quantize_base")
    if not method:
        if reading.section("model.lora_rank"):
            raise SpecError("model.lora_rank", "is given, but the builder has no adapters", "use its lora_ builder")
        return
    named = reading.value("model.lora_attn_modules", ["q_proj", "v_proj"])
    if not isinstance(named, list) or not all(name in _PROJECTIONS for name in named):
        raise SpecError("model.lora_attn_modules", f"{shown(named)} are not projections", f"use {list(_PROJECTIONS)}")
    targets = [_PROJECTIONS[name] for name in named] + ["mlp"] * reading.flag("model.apply_lora_to_mlp")
    fields.update({
        "training.adapters.rank": reading.count("model.lora_rank", 8),
        "training.adapters.alpha": float(reading.number("model.lora_alpha", 16)),
        "training.adapters.dropout": float(reading.number("model.lora_dropout", 0.0)),
        "training.adapters.method": "dora" if reading.flag("model.use_dora") else "lora",
        "training.adapters.targets": targets or ["q_proj"],
    })  # fmt: skip
    if reading.flag("model.apply_lora_to_output"):
        reading.notes.append("model.apply_lora_to_output: an adapter on the head is not priced")
    recipes.read_base(fields, bits=4 if base else None, double=True)  # torchao's NF4 has quantised scales


TORCHTUNE = recipes.reader(
    "torchtune",
    "torchtune",
    _interpret,
    signature=("model._component_", "policy_model._component_"),
    programs=("tune",),
    stacks=("pytorch", "pytorch-compiled"),
    learning=("optimizer.lr", "optimizer.weight_decay", "clip_grad_norm", "lr_scheduler"),
    moves=(
        Move({"enable_activation_checkpointing": True}),
        Move({"enable_activation_checkpointing": False}),
        Move({"enable_activation_checkpointing": True, "enable_activation_offloading": True}),
        Move({"model.quantize_base": True}, recipes.has_adapters),
        Move({"fsdp_cpu_offload": True}, recipes.has_replicas),
        Move({"dtype": "bf16"}, lambda job: job.training.precision == "fp32"),
        Move({"compile": True}),
    ),
    microbatch_key="batch_size",
    accumulation_key="gradient_accumulation_steps",
)
