"""NeMo Automodel: the YAML of ``automodel``, whose ``_target_`` name what is built. It is read, not written."""

from __future__ import annotations

import fnmatch
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.schedules import PLAIN, schedule_record
from shardwise.spec.strategy import DEDUPLICATING

_NAMES = ("pretrained_model_name_or_path", "config.pretrained_model_name_or_path", "config.name_or_path", "config")
_LENGTHS = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size", "packed_sequence.max_length",
            "dataset.seq_len", "dataset.seq_length", "dataset.max_seq_length", "dataset.max_length")  # fmt: skip
_LEARNING = {"learning_rate": "optimizer.lr", "decay": "optimizer.weight_decay", "epsilon": "optimizer.eps",
             "clip_norm": "clip_grad_norm.max_norm", "kind": "lr_scheduler.lr_decay_style"}  # fmt: skip
_OPTIMIZERS = {**recipes.OPTIMIZERS, "flashadamw": "adamw", "adamw8bit": "adam8bit", "dion": "muon", "normuon": "muon"}
_SHARDED = {"fsdp2": True, "megatron_fsdp": True, "ddp": False}
_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "auto": "bf16", "float32": "fp32", "fp32": "fp32", "float16": "fp16"}
_FP8 = {"tensorwise": "fp8", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}
_TE = {"current": "fp8", "delayed": "fp8-delayed", "block": "fp8-blockwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_UNPRICED = {
    "teacher_model": "a teacher, whose weights and passes are not priced, which takes more memory and time",
    "speculative": "a drafter is not priced", "dflash": "a drafter is not priced", "freeze_config":
    "parts are frozen, but priced as if all of the language model were trained: an upper bound",
    "model.text_config": "changes the model, but is not read",
    "qat": "the rounding of weights and activations takes longer than is priced",
    "distributed.multimodal": "encoders of images and sounds are not priced, which take memory and time",
    "distributed.autocast_dtype": "hidden states between layers in fp32 take more memory than is priced",
    "model.num_nextn_predict_layers": "prediction layers are not priced, which take memory and time",
    "dllm": "diffusion over tokens is priced as supervised training, without its second passes",
}  # fmt: skip


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    for key in [key for key, value in reading.settings.items() if value in ("none", "None")]:
        del reading.settings[key]
    _read_model(reading, fields)
    _read_layout(reading, fields)
    _read_length(reading, fields)
    _read_batch(reading, fields)
    _read_kernels(reading, fields)
    _read_optimizer(reading, fields)
    _read_adapters(reading, fields)
    _read_precision(reading, fields)
    recipes.note(reading, _UNPRICED)


def _read_model(reading: Reading, fields: dict[str, Any]) -> None:
    target = str(reading.value("model._target_", ""))
    key = next((name for name in (f"model.{name}" for name in _NAMES) if reading.has(name)), f"model.{_NAMES[0]}")
    recipes.read_model(reading, fields, key)
    if reading.model is None and "model" not in fields and not reading.no_model:
        reading.no_model = f"model._target_ {shown(target)} builds one that no preset describes"
    if "ImageText" in target or "Multimodal" in target:
        reading.notes.append("only the language model is priced: encoders of images and sounds take memory and time")
    changes = [name for name in reading.settings if name.startswith("model.config.num_")]
    if changes and reading.model is None:
        reading.used.update(changes)
        reading.notes.append(f"{', '.join(changes)[:100]}: the model is priced without that change")
    named = str(reading.value("recipe", reading.value("recipe._target_", "")))
    fields["training.task"] = "sft" if "inetune" in named or "SFT" in named else "pretrain"


def _read_layout(reading: Reading, fields: dict[str, Any]) -> None:
    def degree(name: str, usual: int | None = 1) -> Any:
        return reading.count(f"distributed.{name}_size", usual)

    tp, cp, pp, ep = degree("tp"), degree("cp"), degree("pp"), degree("ep")
    dp, replicas = degree("dp", None), degree("dp_replicate")
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.pp": pp, "strategy.ep": ep})
    fields["strategy.sequence_parallel"] = reading.flag("distributed.sequence_parallel") and tp > 1
    if cp > 1:
        fields["strategy.context_method"] = "ring"
    if dp is not None:
        fields["strategy.dp"] = dp
    word = str(reading.value("distributed._target_", "fsdp2")).lower()
    usual = "ddp" if "ddp" in word else "megatron_fsdp" if "megatron" in word else "fsdp2"
    sharded = reading.choice("distributed.strategy", _SHARDED, _SHARDED[usual])
    fields["strategy.zero"] = reading.zero("distributed.zero_dp_strategy", 3, 3) if sharded else 0
    ranks = reading.data_ranks(fields)
    if replicas > 1 and ranks is not None:
        fields["strategy.shard_group"] = ranks * cp // replicas
    # Layers of a pipeline, and of mixtures unless said otherwise, stay gathered (parallelizer.py; config.py).
    key = "distributed.moe.reshard_after_forward" if ep > 1 else "distributed.reshard_after_forward"
    if fields["strategy.zero"] == 3:
        resharded = reading.flag("parallelizer.reshard_after_forward", pp == 1 and ep == 1)
        fields["strategy.keep_parameters"] = not reading.flag(key, resharded)
        if reading.flag("distributed.defer_fsdp_grad_sync", True):
            fields["strategy.accumulate"] = "local"
    if reading.value("distributed.offload_policy") is not None:
        fields.update({f"strategy.offload.{part}": 1.0 for part in ("weights", "gradients", "optimizer")})
    word = reading.value("distributed.activation_checkpointing", reading.value("parallelizer.activation_checkpointing"))
    if word not in (None, False):
        fields["strategy.recompute"] = "selective" if word == "selective" else "full"
        if word == "selective":
            fields["strategy.recompute_operators"] = ["alternate-products"]
    _read_pipeline(reading, fields, pp)
    _read_nodes(reading, fields)


def _read_pipeline(reading: Reading, fields: dict[str, Any], pp: int) -> None:
    section = "autopipeline" if reading.section("autopipeline") else "distributed.pipeline"
    word = str(reading.value(f"{section}.pp_schedule", "1f1b")).lower()
    held, rounds = reading.count(f"{section}.layers_per_stage", None), reading.text(
        f"{section}.round_virtual_stages_to_pp_multiple", "down")  # fmt: skip
    size = reading.count(f"{section}.pp_microbatch_size", 1)
    if pp == 1:
        return
    fields["strategy.microbatch"] = size
    schedules = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zbv",
                 "dualpipev": "dualpipev", "interleavedzerobubble": "interleaved"}  # fmt: skip
    if word not in schedules:
        raise SpecError(f"{section}.pp_schedule", f"{shown(word)} is not known", f"use one of {', '.join(schedules)}")
    fields["strategy.schedule"] = schedules[word]
    model = recipes.model_of(reading, fields)
    if model is not None:
        fields["strategy.stage_layers"] = "balanced"
    if schedule_record(schedules[word]).chooses_chunks:
        chunks = 2
        if held is not None and model is not None:
            stages = -(-model.layers // held)
            chunks = -(-stages // pp) if rounds == "up" else stages // pp
        fields["strategy.interleave"] = chunks
        if chunks < 2:
            fields.update({"strategy.schedule": PLAIN, "strategy.interleave": 1})


def _read_nodes(reading: Reading, fields: dict[str, Any]) -> None:
    """The nodes that a launcher's section names, of as many devices as a rank's node has, or else of eight."""
    nodes = next((reading.count(key) for key in ("slurm.nodes", "benchmark.num_nodes", "ci.nodes", "skypilot.num_nodes")
                  if reading.has(key)), None)  # fmt: skip
    each = reading.count("slurm.ntasks_per_node", 8 if reading.cluster is None else reading.cluster.node_devices)
    if nodes is not None and "strategy.dp" not in fields:
        reading.devices = nodes * each
    reading.used |= {"benchmark.num_nodes", "ci.nodes", "skypilot.num_nodes"}


def _read_length(reading: Reading, fields: dict[str, Any]) -> None:
    lengths = [(key, reading.integer(key, 0)) for key in _LENGTHS]
    length = next((size for _, size in lengths if size > 0), None)
    packed = any(size > 0 for key, size in lengths if key.startswith("packed"))
    if length is None:
        reading.notes.append("no length of samples is set: none is cut; training.seq is the length to price")
    else:
        fields["training.seq"] = length
    if "Mock" not in str(reading.value("dataset._target_", "")):
        recipes.note_lengths(reading, packed=packed, tokens=length)


def _read_batch(reading: Reading, fields: dict[str, Any]) -> None:
    fields["training.global_batch"] = reading.count("step_scheduler.global_batch_size")
    local = reading.count("step_scheduler.local_batch_size", 1)
    fields.setdefault("strategy.microbatch", local)
    recipes.read_steps(reading, fields, "step_scheduler.max_steps")


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    if reading.flag("compile.enabled") or reading.flag("distributed.enable_compile"):
        fields.update({"stack": "pytorch-compiled", "training.compile": True})
    if reading.flag("distributed.enable_async_tensor_parallel"):
        fields["strategy.overlap.tp"] = True
    attention = str(reading.value("model.attn_implementation", reading.value("model.backend.attn", "sdpa"))).lower()
    reading.used.add("model.backend.attn")
    fields["training.attention"] = "unfused" if attention == "eager" else "flash"
    if reading.text("model.backend.rms_norm", "torch_fp32") in ("te", "quack"):
        fields["stack.norms"] = "fused"
    if reading.flag("model.use_liger_kernel"):
        fields.update(recipes.LIGER)
    if reading.text("model.backend.dispatcher", "torch") in (*DEDUPLICATING, "uccl_ep", "mok"):
        fields["strategy.dispatch"] = "deduplicated"
    loss = str(reading.value("loss_fn._target_", "MaskedCrossEntropy"))
    upcast = reading.flag("loss_fn.fp32_upcast", True)
    if loss.endswith(("FusedLinearCrossEntropy", "ChunkedCrossEntropy")):
        fields.update(recipes.LOSS_IN_PIECES)
    elif loss.endswith("TEParallelCrossEntropy"):
        fields["stack.loss"] = "fused"
    else:
        fields["stack.loss"] = "plain" if upcast else "whole"


def _read_optimizer(reading: Reading, fields: dict[str, Any]) -> None:
    target = str(reading.value("optimizer._target_", "torch.optim.AdamW"))
    word = target.rpartition(".")[2].lower()
    fields["training.optimizer"] = _OPTIMIZERS.get(word, "adamw")
    if word not in _OPTIMIZERS:
        reading.notes.append(f"optimizer {target}: priced as AdamW, whose states may be larger or smaller")
    fused, foreach = reading.flag("optimizer.fused"), reading.flag("optimizer.foreach", True)
    # torch's choice, on FSDP2's parameters
    torch = target.startswith("torch.optim") and foreach and not fused
    fields["stack.adamw"] = "foreach unsharded" if torch else "in place"
    recipes.read_learning(reading, fields, _LEARNING)
    betas = reading.value("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        names = zip(("beta1", "beta2"), betas, strict=True)
        fields.update({f"training.optimization.{name}": float(beta) for name, beta in names})


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    """Trained in the format that they are loaded in: without fp32 weights there are no masters, but for TE's Adam."""
    word = str(reading.settings.get("model.torch_dtype", reading.settings.get("model.dtype", "auto")))
    reading.used |= {"model.torch_dtype", "model.dtype"}
    loaded = _FORMATS.get(word.removeprefix("torch."))
    if loaded is None:
        raise SpecError("model.torch_dtype", f"{shown(word)} is not understood", f"use one of {', '.join(_FORMATS)}")
    computed = str(reading.value("distributed.mp_policy.param_dtype", "bfloat16")).removeprefix("torch.")
    fields["training.precision"] = "fp32" if loaded == "fp32" and computed == "float32" else "bf16"
    reduced = str(reading.value("distributed.mp_policy.reduce_dtype", "float32")).removeprefix("torch.")
    moments = str(reading.value("optimizer.exp_avg_dtype", "")).removeprefix("torch.")
    reading.used.add("optimizer.exp_avg_sq_dtype")
    masters, rest = reading.flag("optimizer.master_weights"), reading.flag("optimizer.store_param_remainders")
    if loaded != "fp32" and not masters and "training.adapters.rank" not in fields:
        recipes.keep_all_in_16_bit(fields)
    elif masters:
        fields["stack.masters"] = "rest" if rest else "fp32"
        if moments == "bfloat16":
            fields["training.optimizer"] = "adamw-bf16-moments"
    fields["stack.gradient_reduce"] = "bf16" if reduced == "bfloat16" else "fp32"
    if reading.flag("fp8.enabled"):
        fields["training.precision"] = reading.choice("fp8.recipe_name", _FP8, "fp8")
    elif reading.has("model.backend.te_fp8.recipe"):
        fields["training.precision"] = reading.choice("model.backend.te_fp8.recipe", _TE)
    reading.used |= {"fp8.recipe_name", "fp8.emulate"}


def _read_adapters(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.section("peft"):
        if reading.section("quantization"):
            reading.notes.append("quantization without adapters: the base is priced in 16 bits")
        return
    key = "peft.target_modules"
    named, every = reading.value(key, []), reading.flag("peft.match_all_linear")
    patterns = [named] if isinstance(named, str) else named
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SpecError(key, f"{shown(named)} are not names of layers", "use ['*_proj']")
    ends = [pattern.rpartition(".")[2] for pattern in patterns]
    found = [name for name in _PROJECTIONS if any(fnmatch.fnmatchcase(name, end) for end in ends)]
    if every or not patterns or len(found) == len(_PROJECTIONS):
        targets = ["all-linear"]
    else:
        targets = found or recipes.targets_of(reading, key, [end.strip("*") for end in ends])
    four, eight = reading.flag("quantization.load_in_4bit"), reading.flag("quantization.load_in_8bit")
    double = reading.flag("quantization.bnb_4bit_use_double_quant")
    fields.update({
        "training.adapters.rank": reading.count("peft.dim", 8), "training.adapters.targets": targets,
        "training.adapters.alpha": float(reading.number("peft.alpha", 32)),
        "training.adapters.dropout": float(reading.number("peft.dropout", 0.0)),
        "training.adapters.method": "dora" if reading.flag("peft.use_dora") else "lora",
    })  # fmt: skip
    recipes.read_base(fields, bits=4 if four else 8 if eight else 16, double=double)
    model = recipes.model_of(reading, fields)
    if model is not None and model.moe is not None:
        fields["training.adapters.experts"] = targets == ["all-linear"]


AUTOMODEL = recipes.reader(
    "automodel", "NeMo Automodel", _interpret,
    programs=("automodel", "nemo_automodel"),
    signature=("step_scheduler.local_batch_size", "step_scheduler.global_batch_size"),
    stacks=("pytorch", "pytorch-compiled"),
    learning=("optimizer.lr", "optimizer.weight_decay", "clip_grad_norm", "lr_scheduler", "step_scheduler.num_epochs"),
    moves=(*(Move({"distributed.activation_checkpointing": on}) for on in (True, False)),
           Move({"quantization.load_in_4bit": True}, recipes.has_adapters), Move({"compile.enabled": True})),
    microbatch_key="step_scheduler.local_batch_size",
)  # fmt: skip
