"""TorchTitan: the TOML job configuration of its 0.2 line, and what a run saves of its configuration.

The model is a name and a flavor that TorchTitan ships; another shape has to be registered there first.
Parameters are sharded by FSDP2 as soon as there is more than one data or context rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks import training_values
from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.job_fields import shape_of, with_schedule
from shardwise.interop.frameworks.target import Option, Reading, Target, word_for
from shardwise.interop.frameworks.torchtitan_files import FILES, FLAVORS, SHAPE, flavor_named, known_flavors, model_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import PLAIN, schedule_record
from shardwise.spec.stack import stack_from

_PARALLEL, _PARTS = "parallelism.", "parallelism.module_fqns_per_model_part"
_SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zbv",
              "DualPipeV": "dualpipev"}  # fmt: skip
_OVERLAPS_EXPERTS = ("dualpipev",)
# Of FSDP2, which Accelerate runs too.
ROTATION = {"allgather": "all-gather", "alltoall": "ring"}  # of keys and values in context parallelism
OFFLOAD_ALL = {f"strategy.offload.{kind}": 1.0 for kind in ("optimizer", "gradients", "weights")}
_CONVERTERS = {"fp8": "float8", "fp8-rowwise": "float8", "mxfp8": "mx"}
_FLOAT8 = {"tensorwise": "fp8", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}  # torchao's recipes
# Its per-operator policy keeps attention and every second matmul (distributed/activation_checkpoint.py).
_SELECTIVE = ("alternate-products",)


def hybrid_replicas(job: Job) -> int:
    """Copies of the sharded model, of whole data-parallel ranks each; 1 if they would not be whole."""
    strategy = job.strategy
    replicas = strategy.gradient_group // strategy.sharding_group if strategy.zero else strategy.data_parallel
    return replicas if strategy.data_parallel % max(1, replicas) == 0 else 1


def _compose(job: Job) -> Settings:
    strategy, training = job.strategy, job.training
    name, flavor = flavor_named(job.model.name) or (None, None)
    replicas = hybrid_replicas(job)
    kinds = ["linear", *(["grouped_mm"] if job.model.moe else [])]
    converter = _CONVERTERS.get(training.precision)
    moved = {strategy.offload.optimizer, strategy.offload.gradients, strategy.offload.weights}
    settings: Settings = {
        "model.name": name,
        "model.flavor": flavor,
        "model.converters": [f"quantize.{kind}.{converter}" for kind in kinds] if converter else None,
        "quantize.linear.float8.recipe_name": "rowwise" if training.precision == "fp8-rowwise" else None,
        "optimizer.name": "AdamW" if training.optimizer == "adamw" else None,
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "training.local_batch_size": strategy.microbatch * (job.microbatches if strategy.pp > 1 else 1),
        **training_values.torchtitan_settings(job),
        "training.enable_cpu_offload": True if moved == {1} and strategy.offload.target == "cpu" else None,
        _PARALLEL + "data_parallel_replicate_degree": replicas,
        _PARALLEL + "data_parallel_shard_degree": strategy.data_parallel // replicas,
        "compile.enable": True if strategy.overlap.tp and strategy.tp > 1 else None,
    }
    if strategy.zero:
        keep = strategy.keep_parameters or strategy.zero < 3
        settings[_PARALLEL + "fsdp_reshard_after_forward"] = "never" if keep else "always"
    if strategy.recompute == "selective":
        settings["activation_checkpoint.selective_ac_option"] = "op"
    return {**settings, **_pipeline(job)}


def _pipeline(job: Job) -> Settings:
    job = with_schedule(job, _SCHEDULES.values())  # its own default, 1F1B, takes one stage per rank
    strategy = job.strategy
    if strategy.pp == 1:
        return {}
    counts = stage_layer_counts(job.model, strategy)
    settings: Settings = {
        _PARALLEL + "pipeline_parallel_schedule": word_for(_SCHEDULES, strategy.schedule),
        _PARALLEL + "pipeline_parallel_microbatch_size": strategy.microbatch,
    }
    if len(set(counts)) == 1:
        settings[_PARALLEL + "pipeline_parallel_layers_per_stage"] = counts[0]
        settings[_PARALLEL + "pipeline_parallel_first_stage_less_layers"] = 0
        settings[_PARALLEL + "pipeline_parallel_last_stage_less_layers"] = 0
        return settings
    parts, start = [], 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1].extend(["norm", "output"])
    settings[_PARTS] = parts
    return settings


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    name, flavor = reading.text("model.name", "llama3"), reading.text("model.flavor", "debugmodel")
    known = _model(reading, name, flavor)
    if known is not None:
        fields["model"] = known.name if known.name in FLAVORS else known.to_dict()
    reading.model = reading.model or known
    _read_data(reading, fields)
    _read_pipeline(reading, fields)
    _read_training(reading, fields)
    if fields["strategy.ep"] > 1:
        fields["strategy.expert_tp"] = reading.count(_PARALLEL + "expert_tensor_parallel_degree", 1)
    else:
        reading.value(_PARALLEL + "expert_tensor_parallel_degree")
    overlapped = reading.flag(_PARALLEL + "pipeline_parallel_expert_parallel_overlap", True)
    fields["strategy.overlap.ep"] = overlapped and fields.get("strategy.schedule") in _OVERLAPS_EXPERTS


def _model(reading: Reading, name: str, flavor: str) -> Model | None:
    """The model of a flavor, or as the JSON of a run spells it out; None if neither is known, and why."""
    known, shape = model_of(name, flavor), reading.value(SHAPE)
    if isinstance(shape, Mapping):
        reading.notes.append("the file does not say whether matmuls are in fp8 (--precision)")
        spelled = Model.from_dict({"name": f"{name}-{flavor}".replace("_", "-"), **shape}, "model_spec.model")
        return known if known is not None and _sizes(known) == _sizes(spelled) else spelled
    hub = reading.text("hf_transformers.model")
    if hub is not None:
        known, reading.no_model = None, f"{hub} comes from Hugging Face, with its config.json"
    elif not reading.has("model.flavor"):  # TorchTitan would train its debug model
        known, reading.no_model = None, "the file names no flavor of TorchTitan (model.flavor)"
    elif known is None:
        reading.no_model = f"{name} {flavor} of TorchTitan is not known here ({shape or known_flavors(name)})"
    return known


def _sizes(model: Model) -> dict[str, Any]:
    """What its matrices depend on."""
    return {
        path: value for path, value in shape_of(model).items() if not path.startswith(("model.numerics", "model.max"))
    }


def _read_data(reading: Reading, fields: dict[str, Any]) -> None:
    replicas = reading.count(_PARALLEL + "data_parallel_replicate_degree", 1)
    shards = reading.integer(_PARALLEL + "data_parallel_shard_degree", -1)
    if shards < 1 and shards != -1:
        raise SpecError(_PARALLEL + "data_parallel_shard_degree", f"{shards} is not a degree", "use -1, or 1 and more")
    ranks = reading.data_ranks(fields)
    if shards == -1 and ranks is not None:
        shards = max(1, ranks // replicas)
    if shards > 0:
        fields["strategy.dp"] = shards * replicas
    group = max(1, shards) * fields["strategy.cp"]
    sharded = shards == -1 or group > 1
    fields["strategy.zero"] = 3 if sharded else 0
    keeps = {"default": None, "always": False, "never": True}
    policy = reading.choice(_PARALLEL + "fsdp_reshard_after_forward", keeps)
    if sharded:
        fields["strategy.keep_parameters"] = fields["strategy.pp"] > 1 if policy is None else policy
        if replicas > 1:
            fields["strategy.shard_group"] = group
    offloaded = reading.flag("training.enable_cpu_offload")
    if offloaded:
        fields.update(OFFLOAD_ALL)
    stack = stack_from("torchtitan")
    fields["strategy.accumulate"] = stack.usual_accumulation(
        fields["strategy.zero"], fields["strategy.pp"], leave=offloaded
    )


def _read_pipeline(reading: Reading, fields: dict[str, Any]) -> None:
    local, micro = reading.count("training.local_batch_size", 8), None
    stages, key = fields["strategy.pp"], _PARALLEL + "pipeline_parallel_microbatch_size"
    if stages > 1:
        micro = reading.count(key, 1)
        if local % micro:
            raise SpecError("training.local_batch_size", f"{local} is not a multiple of {key} {micro}", "correct one")
        _read_stages(reading, fields)
    fields["strategy.microbatch"] = micro or local
    ranks, batch = fields.get("strategy.dp"), reading.integer("training.global_batch_size", -1)
    if batch > 0:
        fields["training.global_batch"] = batch
        if ranks and batch % (local * ranks):
            problem = f"{batch} is not a multiple of training.local_batch_size {local} × {ranks} data-parallel ranks"
            raise SpecError("training.global_batch_size", problem, "correct one of the three")
    else:  # -1: one local batch per rank
        fields.pop("training.global_batch", None)
        fields.update({"training.global_batch": local * ranks} if ranks else {})


def _read_stages(reading: Reading, fields: dict[str, Any]) -> None:
    stages, schedule = fields["strategy.pp"], schedule_record(fields.get("strategy.schedule", PLAIN))
    chunks = schedule.chunks or 2
    per_stage = reading.count(_PARALLEL + "pipeline_parallel_layers_per_stage")
    less = [reading.integer(_PARALLEL + f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    parts = reading.value(_PARTS)
    if parts is not None:
        if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
            raise SpecError(_PARTS, f"{shown(parts)} is not a list of lists", "correct it")
        fields["strategy.stage_layers"] = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
        chunks = max(1, len(parts) // stages)
    elif per_stage and reading.model is not None:
        chunks = max(1, -(-(reading.model.layers + sum(less)) // per_stage) // stages)
    if parts is None and sum(less):
        reading.notes.append("first and last stage hold fewer layers: taken as stage_layers balanced")
        fields["strategy.stage_layers"] = "balanced"
    if schedule.chooses_chunks:
        fields["strategy.interleave"] = chunks


# Of 0.2 (distributed/utils.py, maybe_enable_amp); later versions, which save the model's shape, install FSDP's policy
# on a single rank too. With one device or DDP alone autocast computes in bf16 (`stack.autocast`).
_NOT_MIXED = "tp and pp without FSDP compute in fp32: TorchTitan 0.2 turns mixed precision off there"


def _read_training(reading: Reading, fields: dict[str, Any]) -> None:
    converters = reading.value("model.converters", [])
    words = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters)
    full = reading.choice("training.dtype", {"float32": False, "bfloat16": True}, False)
    brain = reading.choice("training.mixed_precision_param", {"bfloat16": True, "float32": False}, True)
    alone = not full and fields["strategy.zero"] == 0 and max(fields["strategy.tp"], fields["strategy.pp"]) > 1
    if alone and brain and not reading.has(SHAPE):
        reading.notes.append(_NOT_MIXED)
        brain = False
    mixed = "bf16" if full else "bf16-fp32-grads" if brain else "fp32"
    scaled = reading.choice("quantize.linear.float8.recipe_name", _FLOAT8, "fp8")
    quantized = {name: scaled if name == "float8" else "mxfp8" for name in ("float8", "mx") if f".{name}" in words}
    fields["training.precision"] = next(iter(quantized.values()), mixed)
    if quantized and mixed == "fp32" and fields["strategy.zero"] == 0:
        reading.notes.append(f"{fields['training.precision']} matmuls between fp32 layers are priced between bf16 ones")
    reading.used.add("training.mixed_precision_reduce")
    if not quantized:
        reading.used.update(key for key in reading.settings if key.startswith("quantize."))  # of no converter
    fields["training.optimizer"] = reading.choice("optimizer.name", {"AdamW": "adamw", "Adam": "adamw"}, "adamw")
    if full:  # the optimizer updates the weights themselves, and its moments have their format
        fields.update({"stack.masters": "none", "stack.sharded_parameters": "16-bit"})
        fields["training.optimizer"] = "adamw-bf16-moments"
    training_values.read_torchtitan(reading, fields)
    fields["training.attention"] = "flash"
    mode, option = fields["strategy.recompute"], reading.text("activation_checkpoint.selective_ac_option", "2")
    if mode == "selective" and option == "op":
        fields["strategy.recompute_operators"] = _SELECTIVE
        if reading.model is not None and reading.model.moe is not None:
            reading.notes.append("selective recomputation of expert layers has no price here: they keep everything")
    elif mode == "selective":
        reading.notes.append(f"every {option} layers fully recomputed: read as recompute full of that share of layers")
        fields["strategy.recompute"] = "full"
        if reading.model is not None and option.isdigit() and int(option) > 0:
            layers = reading.model.layers // fields["strategy.pp"]
            fields["strategy.recompute_layers"] = layers // int(option)


def _notes(job: Job) -> list[str]:
    notes = ["data and checkpoint settings are yours to add"]
    if flavor_named(job.model.name) is None:
        notes.append(f"{job.model.name} is not a flavor of TorchTitan: register it, set model.name and model.flavor")
    return notes


# fmt: off
TORCHTITAN = Target(
    name="torchtitan",
    title="TorchTitan",
    format=FILES,
    signature=("model.flavor", _PARALLEL + "tensor_parallel_degree", "training.local_batch_size",
               _PARALLEL + "data_parallel_shard_degree", "training.seq_len"),
    options=(
        Option("training.seq", "training.seq_len", absent=2048),
        Option("training.global_batch", "training.global_batch_size", read=Reading.integer),
        Option("strategy.tp", _PARALLEL + "tensor_parallel_degree", absent=1),
        Option("strategy.overlap.tp", _PARALLEL + "enable_async_tensor_parallel", absent=False),
        Option("strategy.cp", _PARALLEL + "context_parallel_degree", absent=1),
        Option("strategy.context_method", _PARALLEL + "context_parallel_rotate_method",
               ROTATION, absent="all-gather"),
        Option("strategy.pp", _PARALLEL + "pipeline_parallel_degree", absent=1),
        Option("strategy.schedule", _PARALLEL + "pipeline_parallel_schedule", _SCHEDULES),
        Option("strategy.ep", _PARALLEL + "expert_parallel_degree", absent=1, omit=1),
        Option("strategy.expert_tp", _PARALLEL + "expert_tensor_parallel_degree",
               when=lambda job: job.strategy.ep > 1),
        Option("strategy.dispatch", _PARALLEL + "expert_parallel_comm_backend",
               {"standard": "all-to-all", "deepep": "deduplicated"}),
        Option("strategy.overlap.ep", _PARALLEL + "pipeline_parallel_expert_parallel_overlap",
               when=lambda job: job.strategy.schedule in _OVERLAPS_EXPERTS),
        Option("strategy.recompute", "activation_checkpoint.mode",
               ("none", "selective", "full"), absent="selective"),
        Option("strategy.sequence_parallel", _PARALLEL + "enable_sequence_parallel", when=lambda job: False),
    ),
    compose=_compose,
    interpret=_interpret,
    notes=_notes,
    stacks=("torchtitan@2025",),  # the last whose configurations are TOML
    recipe="bf16-fp32-grads",
    selective=lambda job: _SELECTIVE if job.model.moe is None else (),
    elsewhere={"training.dropout": "its models have no dropout"},
    reasons={
        "strategy.zero": "FSDP2 shards weights, gradients and optimizer together (ZeRO-3), or replicates all",
        "strategy.shard_group": "the sharding group is context ranks times whole data ranks",
        "strategy.accumulate": "FSDP2 reduces gradients after every microbatch, of a pipeline after the last",
        "strategy.sequence_parallel": "tensor parallelism always splits the sequence too",
        "strategy.order": "ranks are laid out tp, cp, dp, pp",
        "strategy.schedule": "runs 1f1b, gpipe, interleaved, zbv and dualpipev",
        "strategy.context_method": "context parallelism rotates or gathers keys and values",
        "strategy.recompute_operators": "selective keeps attention and every second matmul (alternate-products)",
        "strategy.recompute_layers": "all layers alike",
        "strategy.overlap.dp": "FSDP2 always prefetches and overlaps",
        "strategy.overlap.cp": "always overlapped",
        "strategy.overlap.ep": "only with DualPipeV, where it is an option",
        "strategy.offload": "FSDP2 offloads weights, gradients and optimizer together, to CPU memory",
        "strategy.overlap.offload": "FSDP2 always overlaps its transfers",
        "training.precision": lambda job: _NOT_MIXED if job.strategy.sharding_group == 1 and job.strategy.world > 1
        else "bf16 with fp32 reduction and weights, fp8, fp8-rowwise and mxfp8, or fp32",
        "training.optimizer": "only Adam and AdamW",
        "training.optimization.clip_norm": "it always clips",
        "training.attention": "always a fused attention",
        "training.tokens": "counted in whole steps",
    },
    refusals=(
        ("strategy.zero", lambda job: job.strategy.zero == 0 and job.strategy.data_parallel > 1
         and max(job.strategy.tp, job.strategy.pp, job.strategy.cp) >
         1, "replication without sharding cannot be combined with other dimensions"),
        ("strategy.recompute", lambda job: job.strategy.recompute == "selective" and job.model.moe is not None,
         "its selective recomputation of expert layers has no price here"),
        ("strategy.expert_tp", lambda job: job.model.moe is not None and job.strategy.expert_tensor_parallel
         not in ((1, job.strategy.tp) if job.strategy.ep > 1 else (job.strategy.tp,)),
         "experts are split by tp or not at all"),
        ("model.numerics.rope_scaling", lambda job: job.model.numerics.rope_scaling is None
         and (flavor_named(job.model.name) or ("",))[0] == "llama3",
         "the flavor stretches rotary positions as Llama 3.1 does: register one without rope_scaling_args"),
        ("strategy.keep_parameters", lambda job: job.strategy.zero == 3 and not job.strategy.keep_parameters
         and job.strategy.sharding_group > 1
         and job.strategy.pp > 1 and job.strategy.schedule_record.splits_backward,
         "FSDP2 frees weights before a split backward pass reads them: wrong gradients (pytorch#144530)"),
    ),
)
