"""Accelerate: the YAML that ``accelerate launch --config_file`` reads.

Three of its modes are used: plain data parallelism (MULTI_GPU), FSDP2 with its parallelism configuration, and the
DeepSpeed plugin where the job needs what only that has (ZeRO-1 and 2, NVMe, Ulysses, offloading in parts).
Batch, sequence and optimizer belong to the training script.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import training_values
from shardwise.interop.frameworks.deepspeed import DEEPSPEED, NVME, read_offload
from shardwise.interop.frameworks.documents import YAML, Names, Settings
from shardwise.interop.frameworks.target import SCRIPT_AND_OPTIMIZER, Reading, Target, word_for
from shardwise.interop.frameworks.torchtitan import OFFLOAD_ALL, ROTATION, hybrid_replicas
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

_FSDP, _DEEPSPEED, _MESH = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config.parallelism_config_"
_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
# `FP8BackendType` and `DistributedType` of Accelerate 1.15.0 (accelerate/utils/dataclasses.py).
FP8_BACKENDS = {"AO": "fp8", "TE": "fp8-delayed", "MSAMP": "fp8", "NO": "fp8"}  # NO: torchao is looked for first
_REPLICAS = ("MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
             "MULTI_NEURON", "NO")  # fmt: skip
MODES = {**dict.fromkeys(_REPLICAS, "MULTI_GPU"), "FSDP": "FSDP", "DEEPSPEED": "DEEPSPEED"}
NOT_READ = {
    "MEGATRON_LM": "give the arguments of Megatron-LM instead, as a script",
    "XLA": "describe the job in a job file",
}
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_EARLIER = {  # modes of versions before 1.15.0
    "TPU": "describe the job in a job file",
    "TP": "use FSDP with parallelism_config_tp_size, as later versions do",
}


def _parse(text: str, what: str, names: Names) -> Settings:
    """As ``accelerate launch`` reads it: a key has the prefix of its section or not, a sharding strategy its number."""
    settings: Settings = {}
    for path, value in YAML.parse(text, what, names).items():
        section, _, key = path.partition(".")
        if section == "fp8_config":
            path = f"{section}.{key.removeprefix('fp8_')}"
        elif section == "fsdp_config" and key and not key.startswith("fsdp"):
            path = _FSDP + key
        if path == _FSDP + "sharding_strategy" and str(value) in tuple("12345"):
            value = list(_STAGES)[int(value) - 1]
        settings[path] = value
    return settings


def mode_for(job: Job) -> str:
    """The mode of Accelerate that fits the job best."""
    strategy, offload = job.strategy, job.strategy.offload
    states = {offload.optimizer, offload.gradients, offload.weights}
    if _is_ulysses(job) or strategy.zero in (1, 2) or (offload.any and offload.target == "nvme"):
        return "DEEPSPEED"
    if strategy.zero == 3 or strategy.tp > 1 or strategy.cp > 1:
        return "FSDP" if len(states) == 1 else "DEEPSPEED"
    return "MULTI_GPU"


def _is_ulysses(job: Job) -> bool:
    return job.strategy.cp > 1 and job.strategy.context_method == "ulysses"


def _compose(job: Job) -> Settings:
    strategy, mode, precision = job.strategy, mode_for(job), job.training.precision
    backend = "TE" if precision == "mxfp8" else word_for(FP8_BACKENDS, precision)
    settings: Settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": mode,
        "mixed_precision": word_for(_PRECISIONS, precision) or ("bf16" if backend is None else "fp8"),
        "fp8_config.backend": backend,
        "fp8_config.use_mxfp8_block_scaling": True if precision == "mxfp8" else None,
        "num_processes": job.cluster.devices,
        "num_machines": job.cluster.nodes,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
        "debug": False,
    }
    if mode == "FSDP":
        settings.update(_fsdp(job))
        if backend == "AO":  # refused together with that
            settings[_FSDP + "cpu_ram_efficient_loading"] = False
    if mode == "DEEPSPEED":
        settings.update(_deepspeed(job))
        if _is_ulysses(job):
            settings.update({_MESH + "sp_size": strategy.cp, _MESH + "sp_backend": "deepspeed"})
    return settings


def _fsdp(job: Job) -> Settings:
    strategy, full = job.strategy, job.strategy.recompute == "full"
    # ``ParallelismConfig`` rejects copies that shard nothing beside tensor or context parallelism.
    replicas = hybrid_replicas(job) if strategy.zero else 1
    settings: Settings = {
        _FSDP + "version": 2,
        _FSDP + "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        _FSDP + "reshard_after_forward": not strategy.keep_parameters,
        _FSDP + "offload_params": strategy.offload.weights == 1,
        _FSDP + "activation_checkpointing": full,
        _FSDP + "activation_checkpointing_offload": True if full and strategy.offload.activations == 1 else None,
        _FSDP + "state_dict_type": "SHARDED_STATE_DICT",
    }
    if max(strategy.tp, strategy.cp, replicas) > 1:
        settings[_MESH + "dp_replicate_size"] = replicas
        settings[_MESH + "dp_shard_size"] = strategy.data_parallel // replicas
        settings[_MESH + "tp_size"] = strategy.tp
        settings[_MESH + "cp_size"] = strategy.cp
        if strategy.cp > 1:
            settings[_MESH + "cp_comm_strategy"] = word_for(ROTATION, strategy.context_method) or "allgather"
    return settings


def _deepspeed(job: Job) -> Settings:
    strategy, offload = job.strategy, job.strategy.offload
    devices = {"optimizer": offload.optimizer > 0, "param": offload.weights > 0}
    settings: Settings = {
        _DEEPSPEED + "zero_stage": strategy.zero,
        _DEEPSPEED + "gradient_accumulation_steps": job.microbatches,
        _DEEPSPEED + "zero3_init_flag": strategy.zero == 3,
        _DEEPSPEED + "gradient_clipping": job.training.optimization.clip_norm,
    }
    for name, moved in devices.items():
        settings[_DEEPSPEED + f"offload_{name}_device"] = offload.target if moved else "none"
        if moved and offload.target == "nvme":
            settings[_DEEPSPEED + f"offload_{name}_nvme_path"] = offload.folder or NVME
    return settings


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    word = str(reading.text("distributed_type") or "").upper()
    if remedy := {**NOT_READ, **_EARLIER}.get(word):
        raise SpecError("distributed_type", f"{word} is a mode that is not read here", remedy)
    mode = reading.choice("distributed_type", MODES)
    if mode is None:
        raise SpecError("distributed_type", "is missing", "use MULTI_GPU, FSDP or DEEPSPEED")
    reading.devices = _processes(reading, word)
    fields.update({"strategy.tp": 1, "strategy.cp": 1, "strategy.zero": 0})
    precision = reading.choice("mixed_precision", _PRECISIONS, "fp16" if reading.flag("fp16") else "fp32")
    if mode != "DEEPSPEED" and precision == "bf16":
        precision = "bf16-fp32-grads"  # weights stay fp32, and so do their gradients
    fields["training.precision"] = _read_fp8(reading) if precision == "fp8" else precision
    if mode == "FSDP":
        _read_fsdp(reading, fields)
    if mode == "DEEPSPEED":
        fields["stack"] = "deepspeed"
        _read_deepspeed(reading, fields)


def _read_fp8(reading: Reading) -> str:
    backend = reading.text("fp8_config.backend", "NO").upper()
    precision: str = reading.choice("fp8_config.backend", FP8_BACKENDS, FP8_BACKENDS["NO"])
    if backend == "MSAMP":
        reading.notes.append("fp8_config.backend MSAMP: its 8-bit gradients and optimizer states are priced as fp32")
    if backend != "TE":
        return precision
    if reading.value("fp8_config.override_linear_precision", "") not in ("", False, [False] * 3):
        reading.notes.append("fp8_config.override_linear_precision: all three matmuls are priced in FP8")
    return "mxfp8" if reading.flag("fp8_config.use_mxfp8_block_scaling") else precision


def _processes(reading: Reading, word: str) -> int | None:
    """As many as the configuration says; without distribution there is one."""
    processes = reading.count("num_processes")
    key, processes = ("distributed_type", 1) if word == "NO" else ("num_processes", processes)
    if processes is not None and reading.cluster is not None and processes != reading.cluster.devices:
        said = f"{processes}" if key == "num_processes" else "NO is one process"
        problem = f"{said}, but the cluster has {reading.cluster.devices} devices"
        raise SpecError(key, problem, f"use ⟨gpus={processes}⟩")
    return processes


def _read_fsdp(reading: Reading, fields: dict[str, Any]) -> None:
    version = reading.count(_FSDP + "version", 1)
    tp, cp = reading.count(_MESH + "tp_size", 1), reading.count(_MESH + "cp_size", 1)
    replicas = reading.count(_MESH + "dp_replicate_size", 1)
    shards = reading.count(_MESH + "dp_shard_size", 1 if reading.section("parallelism_config") else None)
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.zero": 3})
    if tp > 1:
        fields["strategy.sequence_parallel"] = False
    if cp > 1:
        fields["strategy.context_method"] = reading.choice(_MESH + "cp_comm_strategy", ROTATION, "all-gather")
    if shards is not None:
        fields["strategy.dp"] = replicas * shards
        if shards * cp == 1:
            fields["strategy.zero"] = 0
        elif replicas > 1:
            fields["strategy.shard_group"] = shards * cp
    if version == 1:
        _read_first_version(reading, fields)
    else:
        fields["strategy.keep_parameters"] = not reading.flag(_FSDP + "reshard_after_forward", True)
    if reading.flag(_FSDP + "offload_params"):
        fields.update(OFFLOAD_ALL)
    if reading.flag(_FSDP + "activation_checkpointing"):
        fields["strategy.recompute"] = "full"
        if reading.flag(_FSDP + "activation_checkpointing_offload"):
            fields["strategy.offload.activations"] = 1.0


def _read_first_version(reading: Reading, fields: dict[str, Any]) -> None:
    """Its plugin has a strategy of its own, FULL_SHARD unless the file has another: that one is run."""
    word = reading.text(_FSDP + "sharding_strategy", "FULL_SHARD")
    fields["strategy.zero"] = reading.choice(_FSDP + "sharding_strategy", _STAGES, 3)
    if reading.value(_FSDP + "reshard_after_forward") is not None:
        reading.notes.append("fsdp_reshard_after_forward has no effect with FSDP1: use fsdp_sharding_strategy")
    if word.upper().startswith("HYBRID") and reading.cluster is not None:
        fields["strategy.shard_group"] = reading.cluster.node_devices


def _read_deepspeed(reading: Reading, fields: dict[str, Any]) -> None:
    file = reading.text(_DEEPSPEED + "deepspeed_config_file")
    if file is not None and _read_deepspeed_file(reading, fields, file):
        return
    zero = fields["strategy.zero"] = reading.zero(_DEEPSPEED + "zero_stage", 3, 2)
    fields["strategy.accumulate"] = "sharded"
    fields["strategy.overlap.dp"] = zero == 3  # DeepSpeed's default
    fields["strategy.cp"] = reading.count(_MESH + "sp_size", 1)
    reading.text(_MESH + "sp_backend")
    if fields["strategy.cp"] > 1:
        fields.update({"strategy.context_method": "ulysses", "strategy.overlap.cp": False})
    read_offload(reading, fields, _DEEPSPEED + "offload_{}_device")
    reading.count(_DEEPSPEED + "gradient_accumulation_steps")
    if reading.has(_DEEPSPEED + "gradient_clipping"):
        training_values.read_clip(fields, reading.number(_DEEPSPEED + "gradient_clipping"))


def _read_deepspeed_file(reading: Reading, fields: dict[str, Any], file: str) -> bool:
    """Whether the file of DeepSpeed that is named is there: it then says all that the plugin would."""
    text = reading.beside(file)
    if text is None:
        reading.notes.append(f"deepspeed_config_file {shown(file)} is not beside this file: give that file instead")
        return False
    try:
        named = DEEPSPEED.read(text, reading.model, reading.cluster, reading.given)
    except SpecError as error:
        raise SpecError(f"{file}: {error.field}", error.problem, error.remedy) from None
    fields.update(named.fields)
    reading.notes += [f"{file} is read as the configuration of DeepSpeed", *named.notes]
    reading.notes += [f"not used of {file}: {setting}" for setting in named.unused]
    return True


def _notes(job: Job) -> list[str]:
    given = f"gradient_accumulation_steps={job.microbatches}"
    if mode_for(job) == "FSDP" and job.strategy.gradients_sharded and job.microbatches > 1:
        # Otherwise `Accelerator.no_sync` keeps whole gradients until the last microbatch.
        plugin = f"GradientAccumulationPlugin(num_steps={job.microbatches}, sync_each_batch=True)"
        given = f"gradient_accumulation_plugin={plugin}"
    notes = [f"Accelerator({given}) in the training script"]
    if mode_for(job) == "FSDP":
        notes.append("with FSDP the script passes fsdp_transformer_layer_cls_to_wrap if the model names no layer class")
    return notes


# fmt: off
ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    format=replace(YAML, parse=_parse),
    signature=("distributed_type",),
    options=(),
    compose=_compose,
    interpret=_interpret,
    notes=_notes,
    stacks=("accelerate",),
    recipe="bf16-fp32-grads",
    elsewhere={
        **SCRIPT_AND_OPTIMIZER,
        "training.attention": "the model's code (attn_implementation)",
        "strategy.accumulate": "the Accelerator of the training script: local unless sync_each_batch",
        "strategy.recompute": "the training script calls model.gradient_checkpointing_enable()",
    },
    reasons={
        "strategy.pp": "no pipeline of its own (its Megatron-LM plugin has one: export to megatron)",
        "strategy.ep": "no expert parallelism",
        "strategy.expert_tp": "no expert parallelism",
        "strategy.zero": "FSDP2 shards weights, gradients and optimizer together",
        "strategy.tp": "only the FSDP2 mode has tensor parallelism",
        "strategy.cp": "rotation or gathering with FSDP2, Ulysses with DeepSpeed",
        "strategy.sequence_parallel": "tensor parallelism without sequence parallelism",
        "strategy.shard_group": "only the FSDP2 mode has hybrid sharding, over whole data ranks",
        "strategy.accumulate": "DeepSpeed's ZeRO-2 and 3 reduce gradients after every microbatch",
        "strategy.order": "ranks are laid out tp, cp, dp",
        "strategy.recompute_layers": "all layers alike",
        "strategy.overlap.dp": lambda job: (
            "set in a DeepSpeed file: export to deepspeed" if mode_for(job) == "DEEPSPEED" else "always overlapped"
        ),
        "strategy.overlap.cp": "Ulysses is never overlapped, the others always",
        "strategy.offload": "all states together (FSDP2), or optimizer with gradients, and weights (DeepSpeed)",
        "strategy.offload.activations": "only with FSDP2 and full recomputation, all of them",
        "strategy.offload.gradients": "gradients go where the optimizer goes",
        "training.precision": lambda job: (
            "below bf16 only fp8, fp8-delayed and mxfp8" if job.training.recipe.wide != job.training.recipe.compute
            else "gradients have the format of the weights: 16 bit with DeepSpeed, fp32 otherwise"
        ),
    },
    refusals=(
        ("strategy.recompute", lambda job: job.strategy.recompute == "selective", "whole layers only"),
        ("strategy.zero", lambda job: mode_for(job) == "FSDP" and job.strategy.zero == 0
         and job.strategy.data_parallel > 1, "tensor or context parallelism needs sharding over the data ranks"),
        ("strategy.tp", lambda job: job.strategy.tp > 1 and _is_ulysses(job),
         "Ulysses comes with DeepSpeed, without tensor parallelism"),
        ("strategy.tp", lambda job: mode_for(job) == "FSDP" and job.strategy.data_parallel * job.strategy.cp == 1,
         "a file has tensor parallelism beside FSDP2 only, which finds no ranks to shard over: pass "
         "ParallelismConfig(tp_size=...) to the Accelerator of the training script"),
        ("strategy.offload.weights", lambda job: mode_for(job) == "DEEPSPEED" and job.strategy.offload.weights > 0
         and job.strategy.zero < 3, "offload_param needs ZeRO-3"),
    ),
)
