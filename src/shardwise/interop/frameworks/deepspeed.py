"""DeepSpeed: its JSON configuration.

Tensor parallelism (AutoTP), Ulysses sequence parallelism and expert parallelism (AutoEP) have keys; a pipeline is
built in the training script (`PipelineModule`), of which ``pipeline.stages`` only keeps the number of stages.
"""

from __future__ import annotations

import math
from typing import Any

from shardwise.interop.frameworks import training_values
from shardwise.interop.frameworks.documents import JSON, Settings
from shardwise.interop.frameworks.target import SCRIPT, Option, Reading, Target, product_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from

_ZERO = "zero_optimization."
NVME = "/local_nvme"  # DeepSpeed's own examples mount it there
_RECOMPUTE = "activation_checkpointing"
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "sgd-momentum": "SGD", "muon": "Muon"}
_SUB_GROUP = _ZERO + "sub_group_size"
_MASTERS = {"bf16": "bf16_master_weights_and_grads", "fp16": "fp16_master_weights_and_grads"}
_MOMENTS = "bf16_optimizer_states"
_STATES_LIKE = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "muon": "muon"}
# Settings that a job has no field for: their type is checked, then they are reported as unused.
_NUMBERS = (
    _ZERO + "reduce_bucket_size", _ZERO + "allgather_bucket_size",
    _ZERO + "stage3_prefetch_bucket_size", _ZERO + "stage3_param_persistence_threshold",
    _ZERO + "stage3_max_live_parameters", _ZERO + "stage3_max_reuse_distance",
    _RECOMPUTE + ".number_checkpoints",
)  # fmt: skip
_FLAGS = (
    _ZERO + "contiguous_gradients", _ZERO + "reduce_scatter", _ZERO + "allgather_partitions",
    _ZERO + "offload_optimizer.pin_memory", _ZERO + "offload_param.pin_memory",
    _RECOMPUTE + ".partition_activations", _RECOMPUTE + ".contiguous_memory_optimization",
)  # fmt: skip


def _compose(job: Job) -> Settings:
    strategy, training = job.strategy, job.training
    settings: Settings = {
        "train_batch_size": job.sequences * _counted_again(strategy.tp, strategy.pp),
        "train_micro_batch_size_per_gpu": strategy.microbatch,
        "gradient_accumulation_steps": job.microbatches,
        "optimizer.type": _OPTIMIZERS.get(training.optimizer),
        "fp16.enabled": True if training.precision == "fp16" else None,
        "bf16.enabled": True if training.precision not in ("fp16", "fp32") else None,  # what FP8 layers stand between
        "data_types.grad_accum_dtype": "fp32" if training.precision == "bf16-fp32-grads" else None,
        _ZERO + "overlap_comm": strategy.overlap.dp if strategy.zero else None,
    }
    if strategy.pp > 1 and strategy.stage_layers in ("even", "balanced"):
        settings["pipeline.partition"] = "uniform" if strategy.stage_layers == "even" else "parameters"
    if strategy.ep > 1:
        settings["expert_parallel.enabled"] = True
        settings["expert_parallel.expert_tensor_parallel_size"] = strategy.expert_tensor_parallel
    if strategy.recompute == "full":
        settings[_RECOMPUTE + ".partition_activations"] = False
        settings[_RECOMPUTE + ".cpu_checkpointing"] = strategy.offload.activations == 1
    return {**settings, **_of_stack(job), **_offload(job), **training_values.deepspeed_settings(job)}


def _of_stack(job: Job) -> Settings:
    """What differs from its defaults in a stack of DeepSpeed's; both need ZeRO."""
    stack, settings, compute = job.stack, Settings(), job.training.recipe.compute
    if stack.base != "deepspeed" or not job.strategy.zero:
        return settings
    if job.strategy.zero == 3 and stack.update_elements != stack_from("deepspeed").update_elements:
        settings[_SUB_GROUP] = stack.update_elements
    if stack.masters == "16-bit" and compute in _MASTERS:
        settings[f"{compute}.{_MASTERS[compute]}"] = True
        if compute == "bf16" and job.training.optimizer == "adamw-bf16-moments":
            settings.update({"optimizer.type": "AdamW", f"bf16.{_MOMENTS}": True})
    return settings


def _counted_again(tensor_parallel: int, stages: int) -> int:
    """How often train_batch_size counts a sequence: by AutoTP once for each rank that computes a part of it.

    ``DeepSpeedConfig`` checks it against the whole world unless a pipeline says how many ranks are data parallel.
    """
    return tensor_parallel if stages == 1 else 1


def _offload(job: Job) -> Settings:
    offload, settings = job.strategy.offload, Settings()
    for name, share in (("offload_optimizer.", offload.optimizer), ("offload_param.", offload.weights)):
        if share > 0 and job.strategy.zero > 0:
            settings[_ZERO + name + "device"] = offload.target
            settings[_ZERO + name + "pin_memory"] = True
            if offload.target == "nvme":
                settings[_ZERO + name + "nvme_path"] = offload.folder or NVME
    if 0 < offload.optimizer < 1 and job.strategy.zero == 3:
        settings[_ZERO + "offload_optimizer.ratio"] = offload.optimizer
    return settings


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    if fields["strategy.tp"] > 1:
        fields["strategy.sequence_parallel"] = False
    if fields["strategy.cp"] > 1:
        fields.update({"strategy.context_method": "ulysses", "strategy.overlap.cp": False})
    fields["strategy.pp"] = reading.count("pipeline.stages", int(reading.given.get("strategy.pp") or 1))
    partition = reading.text("pipeline.partition")
    if partition is not None and partition.lower() != "uniform":
        fields["strategy.stage_layers"] = "balanced"
    _read_experts(reading, fields)
    _read_precision(reading, fields)
    _read_optimizer(reading, fields)
    _read_zero(reading, fields)
    _read_batch(reading, fields)
    training_values.read_deepspeed(reading, fields)
    for key in (*_NUMBERS, *_FLAGS):
        read = reading.number if key in _NUMBERS else reading.flag
        if reading.has(key):
            read(key)
        if not key.startswith(_RECOMPUTE) and not key.endswith("pin_memory"):
            reading.used.discard(key)


def _read_experts(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.flag("expert_parallel.enabled", fields["strategy.ep"] > 1):
        fields["strategy.ep"] = 1
        reading.value("expert_parallel.expert_tensor_parallel_size")
    elif fields["strategy.ep"] > 1:
        fields["strategy.expert_tp"] = reading.count("expert_parallel.expert_tensor_parallel_size", 1)


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    bf16_key = "bfloat16.enabled" if reading.has("bfloat16.enabled") else "bf16.enabled"
    fp16, bf16 = reading.flag("fp16.enabled"), reading.flag(bf16_key)
    if fp16 and bf16:
        raise SpecError("fp16.enabled", f"true and {bf16_key} true are mutually exclusive", "enable one of them")
    for key in ("fp16." + _MASTERS["fp16"], bf16_key.replace("enabled", _MASTERS["bf16"])):
        if reading.flag(key):
            if not fields["strategy.zero"]:
                raise SpecError(key, "true needs ZeRO", "set zero_optimization.stage to 1, 2 or 3")
            fields["stack.masters"] = "16-bit"
    gradients = reading.choice("data_types.grad_accum_dtype", ("fp32", "bf16", "fp16"))
    if not fp16 and not bf16 and "auto" in (reading.settings.get("fp16.enabled"), reading.settings.get(bf16_key)):
        reading.notes.append("fp16 and bf16 are left to the trainer (auto): give --precision")
        return
    mixed = "bf16-fp32-grads" if gradients == "fp32" else "bf16"
    fields["training.precision"] = "fp16" if fp16 else mixed if bf16 else "fp32"


def _read_optimizer(reading: Reading, fields: dict[str, Any]) -> None:
    name, momentum = reading.text("optimizer.type"), reading.number("optimizer.params.momentum", 0)
    _read_states(reading, fields, name, momentum)
    key = ("bfloat16." if reading.has("bfloat16.enabled") else "bf16.") + _MOMENTS
    if not reading.flag(key):
        return
    if fields.get("stack.masters") != "16-bit":
        raise SpecError(key, f"true needs {_MASTERS['bf16']}", "set that too")
    if fields.setdefault("training.optimizer", "adamw") == "adamw":
        fields["training.optimizer"] = "adamw-bf16-moments"
    else:
        reading.used.discard(key)


def _read_states(reading: Reading, fields: dict[str, Any], name: str | None, momentum: float) -> None:
    if name is None:
        return
    if name.lower() == "sgd":
        fields["training.optimizer"] = "sgd-momentum" if momentum else "sgd"
        return
    states = _STATES_LIKE.get(name.lower())
    if states is None:
        reading.notes.append(f"optimizer.type {shown(name)} has no counterpart: it is priced with the states of adamw")
    fields["training.optimizer"] = states or "adamw"


def _read_zero(reading: Reading, fields: dict[str, Any]) -> None:
    zero = fields["strategy.zero"]
    overlap = reading.flag(_ZERO + "overlap_comm", zero == 3)  # DeepSpeed's default
    if reading.has(_SUB_GROUP):
        elements = reading.number(_SUB_GROUP)
        if elements < 0:
            raise SpecError(_SUB_GROUP, f"{elements:g} is negative", "give elements of an update under ZeRO-3")
        if zero == 3:
            fields["stack.update_elements"] = max(1, int(elements))
        else:
            reading.used.discard(_SUB_GROUP)
    fields["strategy.overlap.dp"] = overlap and zero > 0
    usual = "cpu" if reading.flag(_ZERO + "cpu_offload") else "none"
    ratio = reading.number(_ZERO + "offload_optimizer.ratio", 1.0)
    read_offload(reading, fields, _ZERO + "offload_{}.device", usual, ratio)
    if reading.section(_RECOMPUTE):
        fields["strategy.recompute"] = "full"
        if reading.flag(_RECOMPUTE + ".cpu_checkpointing"):
            fields["strategy.offload.activations"] = 1.0
        reading.notes.append("the section activation_checkpointing is read as recompute: full")


def read_offload(reading: Reading, fields: dict[str, Any], key: str, usual: str = "none", ratio: float = 1.0) -> None:
    """The devices of the optimizer, ``usual`` unless named, and of the weights; ``key`` has a place for either."""
    optimizer, weights = (
        reading.choice(key.format(name), ("none", "cpu", "nvme"), "none") for name in ("optimizer", "param")
    )
    optimizer = usual if optimizer == "none" else optimizer
    share = 0.0 if optimizer == "none" else ratio
    # ZeRO-Offload keeps the gradients where the optimizer updates from.
    fields.update({"strategy.offload.optimizer": share, "strategy.offload.gradients": share})
    fields["strategy.offload.weights"] = float(weights != "none")
    used = {optimizer, weights} - {"none"}
    if len(used) == 2:
        reading.notes.append("offload_optimizer and offload_param name two devices: both are read as nvme")
    if used:
        fields["strategy.offload.target"] = "nvme" if "nvme" in used else "cpu"
    paths = [reading.text(key.replace("device", "nvme_path").format(name)) for name in ("optimizer", "param")]
    folders = {path for path in paths if path not in (None, "none", NVME)}
    if folders and "nvme" in used:
        fields["strategy.offload.folder"] = min(folders)
        if len(folders) == 2:
            reading.notes.append(f"two folders are named: {min(folders)} is read")


def _read_batch(reading: Reading, fields: dict[str, Any]) -> None:
    """train_batch_size = micro batch × accumulation × data-parallel ranks, two of the first three given."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (reading.count(key) for key in keys)
    if micro is not None:
        fields["strategy.microbatch"] = micro
    if train is None and micro is None:
        reading.notes.append("no batch size is given: give --global-batch and --microbatch")
        return
    again = _counted_again(fields["strategy.tp"], fields["strategy.pp"])
    if train is not None and train % again:
        problem = f"{train} is not a multiple of the {again} tensor-parallel ranks, which DeepSpeed counts too"
        raise SpecError("train_batch_size", problem, "correct it, or tensor_parallel.autotp_size")
    if train is not None:
        train //= again
        fields["training.global_batch"] = train
    if None not in (train, micro, steps) and train % (micro * steps) == 0:
        reading.devices = train // (micro * steps) * product_of(fields, "tp", "cp", "pp")
    ranks = reading.data_ranks(fields)
    if ranks is None:
        return
    if train is None:
        fields["training.global_batch"] = micro * (steps or 1) * ranks
        return
    known = ((keys[1], micro), (keys[2], steps))
    product = math.prod(value for _, value in known if value is not None) * ranks
    exact = micro is not None and steps is not None
    if train % product or (exact and train != product):
        counted = f"{ranks} data-parallel ranks" if again == 1 else f"{ranks * again} ranks"
        words = " × ".join([*(f"{key} {value}" for key, value in known if value is not None), counted])
        problem = f"{train * again} is not {'' if exact else 'a multiple of '}{words}"
        problem += f" = {product * again}" if words != counted else ""
        raise SpecError("train_batch_size", problem, "correct one of the three, or the number of devices")
    fields.setdefault("strategy.microbatch", train // product)


def _notes(job: Job) -> list[str]:
    strategy = job.strategy
    notes = []
    if strategy.dp is not None and job.run.schedule.warmup < 2:
        notes.append("DeepSpeed's schedulers warm up for at least two steps")
    if strategy.tp > 1:
        notes.append(f"tp {strategy.tp} is AutoTP: a Hugging Face model, passed to deepspeed.initialize")
    if _counted_again(strategy.tp, strategy.pp) > 1:
        notes.append(f"train_batch_size counts every sequence {strategy.tp} times: with AutoTP DeepSpeed wants it so")
    if strategy.pp > 1:
        notes.append(f"pp {strategy.pp} needs the model as PipelineModule(num_stages={strategy.pp})")
    if strategy.tp > 1 and strategy.pp > 1:
        notes.append("inside a PipelineModule AutoTP recognises no layers: write tensor-parallel ones")
    if strategy.recompute == "full":
        notes.append("the model itself calls deepspeed.checkpointing.checkpoint")
    return notes


# fmt: off
DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed",
    filename="ds_config.json",
    format=JSON,
    signature=("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization.stage", "bf16.enabled",
               "fp16.enabled", "optimizer.type", "gradient_accumulation_steps"),
    options=(
        Option("strategy.zero", _ZERO + "stage", absent=0, read=lambda reading, key: reading.zero(key, 3)),
        Option("strategy.tp", "tensor_parallel.autotp_size", absent=1, omit=1,
               read=lambda reading, key: 1 if reading.integer(key) == 0 else reading.count(key)),
        Option("strategy.overlap.tp", "tensor_parallel.tp_overlap_comm", absent=False),
        Option("strategy.cp", "sequence_parallel_size", absent=1, omit=1,
               when=lambda job: job.strategy.context_method == "ulysses"),
        Option("strategy.ep", "expert_parallel.autoep_size", absent=1, omit=1),
        Option("strategy.dispatch", "expert_parallel.comm_backend", {"comm": "all-to-all", "deepep": "deduplicated"}),
        Option("strategy.pp", "pipeline.stages", omit=1),
    ),
    compose=_compose,
    interpret=_interpret,
    notes=_notes,
    stacks=("deepspeed",),
    elsewhere={
        **SCRIPT,
        "training.attention": "the model's code",
        "run": "the training script; it may pass its own scheduler to deepspeed.initialize",
    },
    reasons={
        "strategy.cp": "only Ulysses sequence parallelism",
        "strategy.context_method": "only Ulysses sequence parallelism",
        "strategy.overlap.cp": "Ulysses exchanges heads before and after attention",
        "strategy.sequence_parallel": "AutoTP has no sequence parallelism",
        "strategy.shard_group": "ZeRO shards over all data-parallel ranks (MiCS was removed)",
        "strategy.accumulate": "ZeRO-2 and 3 reduce gradients after every microbatch",
        "strategy.schedule": "PipelineModule runs 1f1b (and DualPipeVModule dualpipev, built in the training script)",
        "strategy.stage_layers": "PipelineModule cuts uniformly or by parameters",
        "strategy.recompute": "activation_checkpointing recomputes whole layers",
        "strategy.recompute_layers": "the model's code says which layers",
        "strategy.overlap.dp": "without ZeRO gradients are reduced after the backward pass",
        "strategy.offload.gradients": "gradients are offloaded with the optimizer",
        "strategy.offload.activations": "cpu_checkpointing offloads the inputs of recomputed layers, all of them",
        "strategy.offload.weights": "offload_param moves all weights",
        "strategy.offload.optimizer": "a part of the optimizer only under ZeRO-3 (ratio)",
        "training.precision": "8-bit and 4-bit matmuls come from the model's code (Transformer Engine)",
        "training.optimization.loss_scaling.initial": "fp16.initial_scale_power is a power of 2",
        "training.optimizer": "not among DeepSpeed's optimizers: build it in the training script",
    },
    refusals=(
        ("strategy.zero", lambda job: job.strategy.pp > 1 and job.strategy.zero >= 2,
         "the pipeline engine refuses ZeRO-2 and ZeRO-3"),
        ("strategy.offload.optimizer", lambda job: job.strategy.offload.optimizer > 0 and job.strategy.zero == 0,
         "offloading needs ZeRO"),
        ("strategy.offload.weights", lambda job: job.strategy.offload.weights > 0 and job.strategy.zero < 3,
         "offload_param needs ZeRO-3"),
    ),
)
