"""nanotron: its YAML configuration, the model included.

The data-parallel degree counts replicas; sequence parallelism is the tensor-parallel mode ``REDUCE_SCATTER``.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks import training_values
from shardwise.interop.frameworks.documents import YAML, Settings
from shardwise.interop.frameworks.target import Option, Reading, Table, Target, written
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schedules import PLAIN

_MODEL = "model.model_config."
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bf16-fp32-grads": "bfloat16"}
_FACTORY = "optimizer.optimizer_factory."
_SCHEDULES = {PLAIN: PLAIN, "afab": "gpipe"}
# Required by nanotron, unknown to a job: values to replace.
_PLACEHOLDERS = {"general.project": "shardwise", "general.run": "%date_%jobid", "model.init_method.std": 0.02}
_SHAPE: Table = {
    "layers": (_MODEL + "num_hidden_layers", 32),
    "hidden": (_MODEL + "hidden_size", 4096),
    "heads": (_MODEL + "num_attention_heads", 32),
    "kv_heads": (_MODEL + "num_key_value_heads", None),
    "ffn": (_MODEL + "intermediate_size", 11008),
    "vocab": (_MODEL + "vocab_size", 32000),
    "max_seq": (_MODEL + "max_position_embeddings", 2048),
}
_SWITCHES: Table = {
    "tied_embeddings": (_MODEL + "tie_word_embeddings", False), "qkv_bias": (_MODEL + "attention_bias", False),
}  # fmt: skip
_NUMERICS: Table = {"norm_epsilon": (_MODEL + "rms_norm_eps", 1e-6), "rope_theta": (_MODEL + "rope_theta", 10_000.0)}
_EXPERTS: Table = {"experts": (_MODEL + "moe_config.num_experts", 8), "top_k": (_MODEL + "moe_config.top_k", 2)}


def _compose(job: Job) -> Settings:
    strategy, training = job.strategy, job.training
    adam = training.optimizer not in ("sgd", "sgd-momentum")
    settings: Settings = {
        **_PLACEHOLDERS,
        **_model(job.model),
        "model.dtype": _DTYPES.get(training.precision, "bfloat16"),
        "tokens.batch_accumulation_per_replica": job.microbatches,
        "optimizer.zero_stage": min(strategy.zero, 1),
        "optimizer.accumulate_grad_in_fp32": training.precision not in ("fp16", "bf16"),
        _FACTORY + "name": "adamW" if adam else "sgd",
    }
    if adam:
        settings[_FACTORY + "torch_adam_is_fused"] = True
    if strategy.pp > 1 and strategy.schedule not in _SCHEDULES.values():
        settings["parallelism.pp_engine"] = PLAIN  # its own default is all forward passes first
    recompute = True if strategy.recompute == "full" else None
    return {**settings, **training_values.nanotron_settings(job), "parallelism.recompute_layer": recompute}


def _model(model: Model) -> Settings:
    settings: Settings = {**written(model, _SHAPE), _MODEL + "hidden_act": "silu"}
    settings |= written(model, _SWITCHES) | written(model.numerics, _NUMERICS)
    # Experts and windows exist in the Qwen2 code only, the rest in both.
    qwen = model.moe is not None or model.sliding_window is not None or model.qkv_bias
    settings[_MODEL + ("is_qwen2_config" if qwen else "is_llama_config")] = True
    if model.sliding_window is not None:
        settings[_MODEL + "sliding_window_size"] = model.sliding_window
    if model.moe is not None:
        settings[_MODEL + "intermediate_size"] = model.moe.ffn
        settings |= written(model.moe, _EXPERTS)
        settings[_MODEL + "moe_config.enable_shared_expert"] = model.moe.shared_ffn > 0
        settings[_MODEL + "moe_config.token_dispatcher_type"] = "alltoall"
        settings[_MODEL + "moe_config.layers"] = [i for i in range(model.layers) if model.is_moe_layer(i)]
    return settings


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    _read_model(reading, fields)
    if fields["strategy.tp"] == 1:
        fields.pop("strategy.sequence_parallel", None)
    if fields["strategy.pp"] == 1:
        fields.pop("strategy.schedule", None)
    fields["strategy.recompute"] = "full" if reading.flag("parallelism.recompute_layer") else "none"
    dtype = reading.choice("model.dtype", {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}, "bf16")
    in_fp32 = reading.flag("optimizer.accumulate_grad_in_fp32")
    fields["training.precision"] = "bf16-fp32-grads" if dtype == "bf16" and in_fp32 else dtype
    fields["training.optimizer"] = reading.choice(_FACTORY + "name", {"adamW": "adamw", "sgd": "sgd"}, "adamw")
    fields["training.attention"] = "flash"
    accumulation, ranks = reading.count("tokens.batch_accumulation_per_replica", 1), fields.get("strategy.dp")
    if ranks:
        fields["training.global_batch"] = fields.get("strategy.microbatch", 1) * accumulation * ranks
    reading.value(_FACTORY + "torch_adam_is_fused")
    training_values.read_nanotron(reading, fields)
    fields["strategy.order"] = ("tp", "cp", "dp", "pp")
    layers = fields.get("model.layers")
    if layers and fields["strategy.pp"] > 1:
        sizes = (fields[f"model.{name}"] for name in ("hidden", "ffn", "vocab"))
        fields["strategy.stage_layers"] = layers_by_cost(fields["strategy.pp"], layers, *sizes)
    if "model.moe.experts" in fields:  # its layout with experts puts the replicas outermost
        fields["strategy.order"] = ("tp", "cp", "pp", "dp")
        fields["strategy.expert_tp"] = None


def layers_by_cost(stages: int, layers: int, hidden: int, ffn: int, vocab: int) -> tuple[int, ...]:
    """Layers of every stage as nanotron divides them (src/nanotron/models/base.py, build_model).

    Blocks and head are weighted by the sizes of their matrices; a stage ends with the block that passes its share.
    """
    layer = hidden * (4 * hidden + 3 * ffn)
    share = (layers * layer + hidden * vocab) / stages
    counts, stage = [0] * stages, 0
    for number in range(1, layers + 1):
        counts[stage] += 1
        if number * layer > (stage + 1) * share:
            stage += 1
    return tuple(counts)


def _read_model(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.section("model.model_config"):
        return
    if reading.flag(_MODEL + "is_starcoder2_config"):
        raise SpecError(_MODEL + "is_starcoder2_config", "is not supported", "llama and qwen2 configurations are")
    shape = reading.table({**_SHAPE, **_SWITCHES})
    reading.choice(_MODEL + "hidden_act", {"silu": "swiglu"})
    qwen = reading.flag(_MODEL + "is_qwen2_config")
    reading.flag(_MODEL + "is_llama_config")
    shape.update({"activation": "swiglu", "norm": "rmsnorm", "positions": "rope"})
    shape.update({f"numerics.{name}": value for name, value in reading.table(_NUMERICS).items()})
    if qwen:
        shape["sliding_window"] = reading.count(_MODEL + "sliding_window_size")
    if reading.section(_MODEL + "moe_config"):
        shape.update(_read_experts(reading, shape))
    fields.update({f"model.{name}": value for name, value in shape.items()})


def _read_experts(reading: Reading, shape: dict[str, Any]) -> dict[str, Any]:
    section = _MODEL + "moe_config."
    held = reading.value(section + "layers", [-1])
    every, dense = 1, 0
    if held != [-1] and isinstance(held, list) and held:
        dense = held[0] if len(held) == shape["layers"] - held[0] else 0
        every = held[1] - held[0] if dense == 0 and len(held) > 1 else 1
    reading.text(section + "token_dispatcher_type")
    return {
        **{f"moe.{name}": value for name, value in reading.table(_EXPERTS).items()},
        "moe.ffn": shape["ffn"],
        "moe.shared_ffn": shape["ffn"] if reading.flag(section + "enable_shared_expert") else 0,
        "moe.dense_layers": dense,
        "moe.every": every,
        # nanotron/nn/moe.py: the chosen softmax scores as they are, and no balance loss.
        "numerics.renormalise_top_k": False,
        "numerics.balance_loss": 0.0,
    }


# fmt: off
NANOTRON = Target(
    name="nanotron",
    title="nanotron",
    format=YAML,
    signature=("parallelism.dp", "parallelism.tp", "tokens.micro_batch_size"),
    carries_model=True,
    options=(
        Option("training.seq", "tokens.sequence_length", absent=2048),
        Option("strategy.microbatch", "tokens.micro_batch_size"),
        Option("strategy.dp", "parallelism.dp"),
        Option("strategy.tp", "parallelism.tp", absent=1),
        Option("strategy.pp", "parallelism.pp", absent=1),
        Option("strategy.cp", "parallelism.context_parallel_size", absent=1, omit=1),
        Option("strategy.ep", "parallelism.expert_parallel_size", absent=1, omit=1),
        Option("strategy.schedule", "parallelism.pp_engine", _SCHEDULES, absent="gpipe"),
        Option("strategy.sequence_parallel", "parallelism.tp_mode", {"REDUCE_SCATTER": True, "ALL_REDUCE": False},
               absent=False),
        Option("strategy.overlap.tp", "parallelism.tp_linear_async_communication", absent=False),
        Option("strategy.zero", "optimizer.zero_stage", absent=0, read=lambda reading, key: reading.zero(key, 1)),
    ),
    compose=_compose,
    interpret=_interpret,
    notes=lambda job: ["initialisation is a placeholder; add tokenizer and data_stages"],
    stacks=("nanotron",),
    recipe="bf16-fp32-grads",
    own_way=("strategy.overlap", "strategy.stage_layers"),
    elsewhere={"training.dropout": "its Llama and Qwen2 have no dropout"},
    reasons={
        "strategy.zero": "only ZeRO-1",
        "strategy.shard_group": "ZeRO-1 shards over all data-parallel ranks",
        "strategy.schedule": "only 1f1b and gpipe (afab)",
        "strategy.stage_layers": "it balances the stages itself",
        "strategy.order": lambda job: "ranks are laid out " + (
            "tp, cp, pp, dp with experts" if job.model.moe else "tp, cp, dp, pp"),
        "strategy.expert_tp": "experts are split by tp like everything else",
        "strategy.context_method": "only ring attention",
        "strategy.dispatch": "only all-to-all (or all-gather) of all tokens",
        "strategy.recompute": "whole layers only",
        "strategy.overlap.dp": "gradients always overlap with the backward pass",
        "strategy.overlap.cp": "the ring always overlaps",
        "strategy.offload": "no offloading",
        "training.precision": "fp32, fp16 and bf16 only (its fp8 is experimental)",
        "training.optimization.loss_scaling": "its loss scale is fixed in its code",
        "training.optimizer": "only AdamW and plain SGD",
        "training.attention": "always a fused attention",
        "training.tokens": "counted in whole steps",
        "model": "only the shapes of its Llama and Qwen2",
        "model.mla": "no latent attention",
        "model.moe": "only softmax routing; every expert as wide as the MLP",
        "model.numerics": "its experts are weighted by their softmax scores as they are, without a balance loss",
        "model.numerics.rope_scaling": "its rotary positions take rope_theta only",
    },
)
