"""Colossal-AI: the arguments of one of its plugins as JSON.

Colossal-AI is configured in Python, so the file is ours: ``plugin`` names the class (``MoeHybridParallelPlugin``
with expert parallelism, ``GeminiPlugin`` for ZeRO-3, which has neither stages nor context parallelism) and
``arguments`` are its keyword arguments, which the training script passes on unchanged:
``HybridParallelPlugin(**json.load(file)["arguments"])``. Only ``gradient_checkpoint_config`` stands for an object:
``PipelineGradientCheckpointConfig(**value)``.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks import training_values
from shardwise.interop.frameworks.documents import JSON, Settings
from shardwise.interop.frameworks.job_fields import with_schedule
from shardwise.interop.frameworks.target import SCRIPT_AND_OPTIMIZER, Option, Reading, Target
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import PLAIN, schedule_record

_IN = "arguments."
_CHECKPOINT = _IN + "gradient_checkpoint_config."
_HYBRID, _EXPERTS, _GEMINI = "HybridParallelPlugin", "MoeHybridParallelPlugin", "GeminiPlugin"
# ZeRO's stages by the plugins that do not have one to choose (booster/plugin/*.py).
_STAGES = {_GEMINI: 3, "TorchFSDPPlugin": 3, "TorchDDPPlugin": 0}
_PLUGINS = (_HYBRID, _EXPERTS, "LowLevelZeroPlugin", *_STAGES)
_MODES = {"split_gather": "tensor", "ring": "tensor", "all_to_all": "ulysses", "ring_attn": "ring"}


def _is_gemini(job: Job) -> bool:
    strategy = job.strategy
    return strategy.zero == 3 and strategy.pp == strategy.cp == strategy.ep == 1


def _is_hybrid(job: Job) -> bool:
    return not _is_gemini(job)


def _compose(job: Job) -> Settings:
    strategy, training, order = job.strategy, job.training, job.strategy.order
    precision = {"fp32": "fp32", "fp16": "fp16"}.get(training.precision, "bf16")
    plain: Settings = {
        _IN + "precision": precision,
        _IN + "use_fp8": True if training.precision == "fp8" else None,
        **training_values.colossalai_settings(job),
    }
    if _is_gemini(job):
        return {**plain, **_gemini(job)}
    settings: Settings = {
        "plugin": _EXPERTS if strategy.ep > 1 else _HYBRID,
        # A pipeline refuses ZeRO-2, the plugin for experts runs ZeRO-1 instead.
        _IN + "zero_stage": min(strategy.zero, 1 if max(strategy.pp, strategy.ep) > 1 else 2),
        _IN + "cpu_offload": True if strategy.offload.optimizer == 1 else None,
        _IN + "enable_flash_attention": training.attention == "flash",
        # The pipeline is outermost unless the job puts the replicas there.
        (_IN + ("moe_dp_outside" if strategy.ep > 1 else "dp_outside")): order.index("dp") > order.index("pp"),
    }
    if strategy.cp > 1:
        mode = {"ring": "ring_attn", "ulysses": "all_to_all"}.get(strategy.context_method)
        if mode:
            settings.update({_IN + "enable_sequence_parallelism": True, _IN + "sequence_parallelism_mode": mode})
            settings[_IN + "sp_size"] = strategy.cp
    elif strategy.tp > 1 and strategy.sequence_parallel:
        settings[_IN + "enable_sequence_parallelism"] = True
        settings[_IN + "sequence_parallelism_mode"] = "split_gather"
    return {**plain, **settings, **_pipeline(job), **_recompute(job)}


def _gemini(job: Job) -> Settings:
    strategy, offload = job.strategy, job.strategy.offload
    return {
        "plugin": _GEMINI,
        _IN + "precision": "fp16" if job.training.precision == "fp16" else "bf16",  # it has no other
        _IN + "placement_policy": "static",
        _IN + "shard_param_frac": 1.0,
        _IN + "offload_optim_frac": offload.optimizer or None,
        _IN + "offload_param_frac": offload.weights or None,
        _IN + "extra_dp_size": strategy.gradient_group // strategy.sharding_group,
        _IN + "enable_gradient_accumulation": job.microbatches > 1 or None,
        _IN + "enable_async_reduce": strategy.overlap.dp,
        _IN + "enable_flash_attention": job.training.attention == "flash",
        _IN + "enable_sequence_parallelism": (strategy.tp > 1 and strategy.sequence_parallel) or None,
    }


_SCHEDULES = ("1f1b", "interleaved", "zbv")  # that it runs


def _pipeline(job: Job) -> Settings:
    job = with_schedule(job, _SCHEDULES)  # the plugin asserts that 1f1b has one chunk per rank
    strategy = job.strategy
    if strategy.pp == 1:
        return {}
    counts = stage_layer_counts(job.model, strategy)
    return {
        _IN + "pp_style": strategy.schedule,
        _IN + "num_microbatches": job.microbatches,
        _IN + "microbatch_size": strategy.microbatch,
        _IN + "num_model_chunks": strategy.chunks_per_rank,
        _IN + "num_layers_per_stage": list(counts) if len(set(counts)) > 1 and strategy.chunks_per_rank == 1 else None,
        _IN + "overlap_p2p": strategy.overlap.pp,
    }


def _recompute(job: Job) -> Settings:
    strategy = job.strategy
    if strategy.recompute != "full":
        return {}
    if strategy.recompute_layers is None or strategy.pp == 1:
        return {_CHECKPOINT + "gradient_checkpointing_ratio": 1.0}
    return {_CHECKPOINT + "num_ckpt_layers_per_stage": [strategy.recompute_layers] * strategy.pp}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    plugin = reading.choice("plugin", _PLUGINS, _EXPERTS if fields["strategy.ep"] > 1 else _HYBRID)
    experts = plugin == _EXPERTS
    if plugin == "LowLevelZeroPlugin":
        fields["strategy.zero"] = reading.zero(_IN + "stage", 2, 1)
    fields["strategy.zero"] = _STAGES.get(plugin, fields["strategy.zero"])
    _read_sequence(reading, fields, gemini=plugin == _GEMINI)
    precision = reading.choice(_IN + "precision", ("fp16", "bf16", "fp32"), "fp16")
    fields["training.precision"] = "fp8" if reading.flag(_IN + "use_fp8") else precision
    zero = fields["strategy.zero"]
    if experts and zero == 2:
        reading.notes.append("the plugin for experts runs ZeRO-1 instead of 2, without overlap")
        fields["strategy.zero"] = 1
    if experts:
        fields.update({"strategy.overlap.dp": False, "strategy.expert_tp": None})
    if plugin == _GEMINI:
        _read_gemini(reading, fields)
    elif reading.flag(_IN + "cpu_offload") and zero:
        fields["strategy.offload.optimizer"] = 1.0
    outside = reading.flag(_IN + "moe_dp_outside", reading.flag(_IN + "dp_outside", True))
    inner = ("tp", "cp") if fields.get("strategy.context_method") == "ring" or plugin == _GEMINI else ("cp", "tp")
    fields["strategy.order"] = (*inner, *(("pp", "dp") if outside else ("dp", "pp")))
    flash = reading.flag(_IN + "enable_all_optimization") or reading.flag(_IN + "enable_flash_attention")
    fields["training.attention"] = "flash" if flash or fields.get("strategy.context_method") == "ring" else "unfused"
    _read_pipeline(reading, fields)
    _read_recompute(reading, fields)
    training_values.read_colossalai(reading, fields)


def _read_gemini(reading: Reading, fields: dict[str, Any]) -> None:
    if reading.choice(_IN + "placement_policy", ("static", "auto"), "static") == "auto":
        reading.notes.append("placement_policy auto moves states as memory allows: priced as static")
    sharded = reading.number(_IN + "shard_param_frac", 1.0)
    if sharded < 0.5:
        fields["strategy.zero"] = 2
    if sharded not in (0, 1):
        reading.notes.append(f"shard_param_frac {sharded} is priced as ZeRO-{fields['strategy.zero']}")
    moved = {name: reading.number(_IN + f"offload_{key}_frac", 0.0) for name, key in _MOVED.items()}
    fields.update({f"strategy.offload.{name}": share for name, share in moved.items()})
    fields["strategy.overlap.dp"] = reading.flag(_IN + "enable_async_reduce", True)
    reading.flag(_IN + "enable_gradient_accumulation")
    copies, ranks = reading.count(_IN + "extra_dp_size", 1), reading.data_ranks(fields)
    if copies > 1 and ranks is not None:
        fields["strategy.shard_group"] = max(1, ranks // copies)
    if not reading.flag(_IN + "master_weights", True):
        fields["stack.masters"] = "none"


_MOVED = {"optimizer": "optim", "weights": "param"}


def _read_sequence(reading: Reading, fields: dict[str, Any], *, gemini: bool) -> None:
    enabled = reading.flag(_IN + "enable_sequence_parallelism")
    mode = "tensor" if gemini else reading.choice(_IN + "sequence_parallelism_mode", _MODES, "ulysses")
    size = reading.count(_IN + "sp_size", 1)
    fields["strategy.cp"] = 1
    if fields["strategy.tp"] > 1:
        fields["strategy.sequence_parallel"] = enabled and mode == "tensor"
    if enabled and mode != "tensor":
        fields.update({"strategy.cp": size, "strategy.context_method": mode, "strategy.overlap.cp": mode == "ring"})


def _read_pipeline(reading: Reading, fields: dict[str, Any]) -> None:
    number, size = reading.count(_IN + "num_microbatches"), reading.count(_IN + "microbatch_size")
    chunks, counts = reading.count(_IN + "num_model_chunks", 1), reading.value(_IN + "num_layers_per_stage")
    overlapped = reading.flag(_IN + "overlap_p2p", True)
    if fields["strategy.pp"] == 1:
        return
    schedule = fields.get("strategy.schedule", PLAIN)
    if schedule_record(schedule).chooses_chunks:
        fields["strategy.interleave"] = chunks
    fields["strategy.overlap.pp"] = overlapped and schedule != PLAIN  # which waits for its transfers
    if counts is not None:
        if not isinstance(counts, list) or not all(isinstance(count, int) for count in counts):
            raise SpecError(_IN + "num_layers_per_stage", "is not a list of whole numbers", "write one per stage")
        fields["strategy.stage_layers"] = tuple(counts)
    if size is not None:
        fields["strategy.microbatch"] = size
        ranks = reading.data_ranks(fields)
        if number is not None and ranks is not None:
            fields["training.global_batch"] = number * size * ranks


def _read_recompute(reading: Reading, fields: dict[str, Any]) -> None:
    ratio = reading.number(_CHECKPOINT + "gradient_checkpointing_ratio", 0.0)
    counts = reading.value(_CHECKPOINT + "num_ckpt_layers_per_stage")
    if isinstance(counts, list) and counts:
        fields.update({"strategy.recompute": "full", "strategy.recompute_layers": max(map(int, counts))})
    elif ratio > 0:
        fields["strategy.recompute"] = "full"
        if ratio < 1 and reading.model is not None:
            fields["strategy.recompute_layers"] = int(ratio * reading.model.layers / fields["strategy.pp"])


def _notes(job: Job) -> list[str]:
    local = job.sequences // job.strategy.data_parallel
    notes = [f"pass `arguments` to the plugin; the data loader takes batches of {local}"]
    if job.strategy.recompute == "full":
        notes.append("call model.gradient_checkpointing_enable() and pass PipelineGradientCheckpointConfig")
    if job.strategy.schedule_record.ends_meet and job.strategy.pp > 1:
        notes.append(f"{job.strategy.schedule} also needs scheduler_nodes, computed by its v_schedule")
    return notes


# fmt: off
COLOSSALAI = Target(
    name="colossalai",
    title="Colossal-AI",
    format=JSON,
    signature=("plugin", _IN + "tp_size", _IN + "pp_size"),
    options=(
        Option("strategy.tp", _IN + "tp_size", absent=1),
        Option("strategy.pp", _IN + "pp_size", absent=1, when=_is_hybrid),
        Option("strategy.ep", _IN + "ep_size", absent=1, omit=1),
        Option("strategy.zero", _IN + "zero_stage", absent=0, when=_is_hybrid,
               read=lambda reading, key: reading.zero(key, 2)),
        Option("strategy.overlap.dp", _IN + "overlap_communication", absent=True, always=True, when=_is_hybrid),
        Option("strategy.schedule", _IN + "pp_style", _SCHEDULES),
    ),
    compose=_compose,
    interpret=_interpret,
    notes=_notes,
    stacks=("colossalai",),
    elsewhere=SCRIPT_AND_OPTIMIZER,
    reasons={
        "strategy.zero": "ZeRO-3 is GeminiPlugin's, without pipeline, experts and context parallelism",
        "strategy.shard_group": "ZeRO shards over all data-parallel ranks (with GeminiPlugin over a part of them)",
        "strategy.accumulate": "ZeRO-2 reduces gradients after every microbatch",
        "strategy.cp": "ring attention or Ulysses only",
        "strategy.context_method": "ring attention or Ulysses only",
        "strategy.sequence_parallel": "one mode at a time: with context parallelism tensor ranks keep whole sequences",
        "strategy.order": "ranks are laid out sp, tp (tp, sp with ring attention), then dp and pp either way round",
        "strategy.expert_tp": "experts are split by tp like everything else",
        "strategy.dispatch": "only all-to-all of all tokens",
        "strategy.schedule": "only 1f1b, interleaved and zbv",
        "strategy.stage_layers": "num_layers_per_stage with one chunk per rank only",
        "strategy.recompute": "whole layers only",
        "strategy.recompute_layers": "a number of layers per stage only with a pipeline",
        "strategy.overlap.dp": "the plugin for experts switches overlap off",
        "strategy.overlap.pp": "only interleaved and zbv overlap their transfers",
        "strategy.overlap.cp": "Ulysses is never overlapped, ring attention always",
        "strategy.overlap.tp": "tensor-parallel transfers are not overlapped",
        "strategy.offload.optimizer": "all of the optimizer or nothing, with ZeRO-1 and 2",
        "strategy.offload": "cpu_offload moves the optimizer states only, GeminiPlugin those and weights",
        "training.optimization.loss_scaling.static": "its loss scale is found by trial",
        "training.precision": "fp32, fp16, bf16 and fp8, gradients in the weights' format",
    },
    refusals=(
        ("strategy.zero", lambda job: job.strategy.pp > 1 and job.strategy.zero == 2, "a pipeline refuses ZeRO-2"),
        ("strategy.ep", lambda job: job.strategy.data_parallel % job.strategy.ep > 0, "ep must divide dp"),
    ),
)
