"""Axolotl: the YAML that ``axolotl train`` reads. It is read, not written."""

from __future__ import annotations

import re
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

# Axolotl's PEFT adapters; `lora_target_linear` finds every linear layer but the head (utils/lora.py).
_ADAPTERS = ("lora", "qlora", "dora")
_LEARNING = {"learning_rate": "learning_rate", "decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
             "epsilon": "adam_epsilon", "clip_norm": "max_grad_norm", "kind": "lr_scheduler"}  # fmt: skip
# Of older files; the canonical name is `attn_implementation` (schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL).
_ATTENTION_FLAGS = {"eager_attention": "unfused", "flash_attention": "flash", "sdp_attention": "flash",
                    "xformers_attention": "flash", "flex_attention": "flash", "sage_attention": "flash"}  # fmt: skip
_AS_SUPERVISED = {
    "kto": "no frozen reference is priced", "orpo": "both answers of a pair are priced as one batch",
    "simpo": "both answers of a pair are priced as one batch",
    "grpo": "only the update of the policy: generation takes longer", "gdpo": "only the update of the policy",
    "ebft": "only the update of the policy",
}  # fmt: skip
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PIECES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy", "flash_attn_cross_entropy")


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_model(reading, fields, "base_model")
    fields["training.seq"] = reading.count("sequence_len", 512)
    fields["training.task"] = "sft"
    _read_precision(reading, fields)
    _read_layout(reading, fields)
    recipes.read_batch(reading, fields, "micro_batch_size", "gradient_accumulation_steps", usual=1)
    packed = reading.flag("sample_packing")
    padded = reading.flag("pad_to_sequence_len") or reading.has("pretraining_dataset")
    if packed or not padded:
        recipes.note_lengths(reading, packed=packed, tokens=fields["training.seq"])
    recipes.read_optimizer(reading, fields, "optimizer", "adamw_torch_fused")
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "max_steps")
    _read_method(reading, fields)
    _read_recompute(reading, fields)
    _read_kernels(reading, fields)
    _read_task(reading, fields)
    sharded = fields["strategy.zero"] == 3 or fields.get("stack") == "deepspeed"
    if "training.adapters.rank" not in fields and not sharded and fields["training.precision"] == "bf16":
        recipes.keep_all_in_16_bit(fields)


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    """``bf16: auto`` is bf16 wherever the device has it; the model is loaded in that format."""
    switched = {name: recipes.is_on(reading, name) for name in ("bf16", "bfloat16", "fp16", "float16")}
    half = switched["bf16"] or switched["bfloat16"]
    fields["training.precision"] = "bf16" if half else "fp32"
    if not half and (switched["fp16"] or switched["float16"]):
        fields["training.precision"] = "fp16"
    if reading.flag("fp8"):
        fields["training.precision"] = "fp8"


def _read_layout(reading: Reading, fields: dict[str, Any]) -> None:
    tp, ep = reading.count("tensor_parallel_size", 1), reading.count("expert_parallel_size", 1)
    cp = reading.count("context_parallel_size", reading.count("sequence_parallel_degree", 1))
    replicas, shards = reading.count("dp_replicate_size", 1), reading.count("dp_shard_size", None)
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.zero": 0})
    if ep > 1:
        fields["strategy.ep"] = ep
    if tp > 1:
        fields["strategy.sequence_parallel"] = False
    if cp > 1:  # its default function gathers keys, as Llama 3 (monkeypatch/ring_attn)
        ring = str(reading.value("ring_attn_func", "varlen_llama3")).startswith("batch")
        fields["strategy.context_method"] = "ring" if ring else "all-gather"
    listed = reading.value("fsdp")
    sharding = listed or reading.section("fsdp_config") or (shards or 1) > 1
    if reading.has("deepspeed"):
        recipes.read_deepspeed(reading, fields, "deepspeed")
    elif sharding:
        version = reading.count("fsdp_version", reading.count("fsdp_config.fsdp_version", 1 if listed else 2))
        recipes.read_fsdp(reading, fields, "fsdp_config", version)
        words = listed if isinstance(listed, list) else []
        if "shard_grad_op" in words:
            fields["strategy.zero"] = 2
        if "offload" in words:
            fields.update({f"strategy.offload.{name}": 1.0 for name in ("weights", "gradients", "optimizer")})
    if shards is not None:
        fields["strategy.dp"] = replicas * shards
        if replicas > 1 and shards > 1:
            fields["strategy.shard_group"] = shards * cp


def _read_method(reading: Reading, fields: dict[str, Any]) -> None:
    word = str(reading.value("adapter", "") or "").lower()
    eight, four = reading.flag("load_in_8bit"), reading.flag("load_in_4bit") or reading.flag("gptq")
    bits = 4 if four else 8 if eight else None
    if not word:
        if bits:
            reading.notes.append("weights in few bits are trained only by adapters: the base is priced in 16 bits")
        _read_unfrozen(reading)
        return
    if word not in _ADAPTERS:
        raise SpecError("adapter", f"{shown(word)} is not priced", f"priced are {', '.join(_ADAPTERS)}")
    every = reading.flag("lora_target_linear")
    named = reading.value("lora_target_modules")
    fields.update({
        "training.adapters.rank": reading.count("lora_r", 8),
        "training.adapters.alpha": float(reading.number("lora_alpha", 8)),
        "training.adapters.dropout": float(reading.number("lora_dropout", 0.0)),
        "training.adapters.method": "dora" if word == "dora" or reading.flag("peft_use_dora") else "lora",
        "training.adapters.scaling": "rank-stabilised" if reading.flag("peft_use_rslora") else "standard",
        "training.adapters.targets": ["all-linear"] if every or named is None
        else _named_targets(reading, named),
    })  # fmt: skip
    model = recipes.model_of(reading, fields)
    mixture = model is not None and model.moe is not None
    fields["training.adapters.experts"] = mixture and reading.value("lora_target_parameters") is not None
    loaded = 16 if fields["training.precision"] != "fp32" else None
    bits = bits or (4 if word == "qlora" else loaded)
    recipes.read_base(fields, bits=bits, double=True)  # loaders/model.py
    if not reading.flag("quantize_moe_experts") and mixture and bits in (4, 8):
        reading.notes.append("experts stay in 16 bits without quantize_moe_experts: more memory than is priced")
    recipes.read_saved_modules(reading, fields, "lora_modules_to_save")
    fused = [reading.flag(name) for name in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")]
    if all(fused):
        fields["stack.adapters"] = "fused"


def _named_targets(reading: Reading, named: Any) -> list[str]:
    if isinstance(named, str) and any(sign in named for sign in "|()\\*"):
        # A pattern is not run, which may take for ever: its words say what it names, as (q|k|v)_proj does.
        words = set(re.findall(r"[a-z_]+", named))
        named = [name for name in _PROJECTIONS if name in words or {name.removesuffix("_proj"), "_proj"} <= words]
        reading.notes.append(f"lora_target_modules is a pattern, read as {', '.join(named) or 'all linear layers'}")
    return recipes.targets_of(reading, "lora_target_modules", named)


def _read_unfrozen(reading: Reading) -> None:
    if reading.has("unfrozen_parameters"):
        reading.value("unfrozen_parameters")
        reading.notes.append(
            "unfrozen_parameters freezes the rest: priced as if all weights were trained, an upper bound"
        )


def _read_recompute(reading: Reading, fields: dict[str, Any]) -> None:
    word = reading.value("gradient_checkpointing", False)
    if word not in (False, "false"):
        fields["strategy.recompute"] = "full"
    if str(word).startswith("offload") or reading.value("activation_offloading", False) is not False:
        fields["strategy.recompute"] = "full"
        fields["strategy.offload.activations"] = 1.0


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_attention(reading, fields, "attn_implementation")
    for flag, kind in _ATTENTION_FLAGS.items():
        if reading.value(flag, False) is True:
            fields["training.attention"] = kind
    names = ("liger_rms_norm", "liger_glu_activation", "liger_rope", "liger_layer_norm", "liger_swiglu")
    liger = [reading.flag(name) for name in names]
    if any(liger):
        fields.update(recipes.LIGER)
    plugins = str(reading.value("plugins", "")).lower()
    pieces = [reading.value(name, False) is True for name in _PIECES]
    if any(pieces) or "cut_cross_entropy" in plugins:
        fields.update(recipes.LOSS_IN_PIECES)
    if recipes.is_on(reading, "torch_compile"):
        fields.update({"training.compile": True, "stack.elementwise": "compiled"})


def _read_task(reading: Reading, fields: dict[str, Any]) -> None:
    word = str(reading.value("rl", "") or "").lower()
    if reading.section("qat"):
        reading.notes.append("qat: the rounding of weights and activations takes longer than is priced")
    if reading.flag("reward_model") or reading.flag("process_reward_model"):
        reading.notes.append("reward_model: its head of one output is priced as that of the language model")
    if word in ("dpo", "ipo"):
        fields["training.task"] = "dpo"
    elif why := _AS_SUPERVISED.get(word):
        reading.notes.append(f"rl {word} is priced as supervised training: {why}")
    elif word:
        reading.notes.append(f"rl {word} is not known: priced as supervised training")


AXOLOTL = recipes.reader(
    "axolotl",
    "Axolotl",
    _interpret,
    signature=("base_model",),
    programs=("axolotl",),
    stacks=("accelerate", "deepspeed"),
    learning=("learning_rate", "weight_decay", "adam_", "max_grad_norm", "lr_scheduler", "num_epochs"),
    moves=(
        Move({"gradient_checkpointing": True}),
        Move({"gradient_checkpointing": False}),
        Move({"gradient_checkpointing": "offload"}),
        Move({"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": None}, recipes.has_adapters),
        recipes.in_bf16(),
        # Its own files (deepspeed_configs).
        *recipes.by_deepspeed(
            *(
                f"deepspeed_configs/{name}.json"
                for name in ("zero1", "zero2", "zero3_bf16", "zero3_bf16_cpuoffload_all")
            )
        ),
    ),
    microbatch_key="micro_batch_size",
    accumulation_key="gradient_accumulation_steps",
)
