"""GPT-NeoX: the YAML of ``deepy.py train.py``. It is read, not written.

Its keys have dashes or underscores. It runs on DeepSpeed, with Megatron's tensor parallelism and DeepSpeed's pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.documents import Names, Settings
from shardwise.interop.frameworks.target import Move, Reading, product_of
from shardwise.spec.errors import SpecError

VOCABULARY = 50_432  # of the usual tokenizer, padded to a multiple of 128 (tokenizer.py, _vocab_size_with_padding)
_GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swiglu": "swiglu", "geglu": "geglu"}
_POSITIONS = {"learned": "learned", "rotary": "rope", "none": "none", "alibi": "none", "sinusoidal": "none"}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
_LEARNING = {"learning_rate": "optimizer.params.lr", "epsilon": "optimizer.params.eps", "decay": "weight_decay",
             "clip_norm": "gradient_clipping", "kind": "lr_decay_style"}  # fmt: skip


def _parse(text: str, what: str, names: Names) -> Settings:
    settings = recipes.RECIPE.parse(text, what, names)
    return {key.replace("-", "_"): value for key, value in settings.items()}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    if reading.model is None:
        fields.update({f"model.{name}": value for name, value in _model(reading).items()})
    fields["training.seq"] = reading.count("seq_length", None) or 2048
    tp, stages = reading.count("model_parallel_size", 1), reading.integer("pipe_parallel_size", 0)
    fields.update({"strategy.tp": tp, "strategy.pp": max(1, stages), "strategy.cp": 1})
    fields["strategy.sequence_parallel"] = reading.flag("sequence_parallel")
    if stages > 1:
        fields["strategy.schedule"] = "1f1b"
        if str(reading.value("pipe_partition_method", "type:transformer|mlp")).lower() == "parameters":
            fields["strategy.stage_layers"] = "balanced"
    zero = reading.zero("zero_optimization.stage", 3, 0)
    fields["strategy.zero"] = reading.zero("zero_stage", 3, zero)
    if reading.flag("zero_optimization.cpu_offload"):
        fields.update({"strategy.offload.optimizer": 1.0, "strategy.offload.gradients": 1.0})
    fields["strategy.overlap.dp"] = reading.flag("zero_optimization.overlap_comm", fields["strategy.zero"] == 3)
    if reading.flag("checkpoint_activations"):
        fields["strategy.recompute"] = "full"
    _read_batch(reading, fields)
    _read_precision(reading, fields)
    recipes.read_optimizer(reading, fields, "optimizer.type", "adam")
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "train_iters")
    fields["training.attention"] = "flash" if "flash" in str(reading.value("attention_config", "")) else "unfused"
    if reading.number("hidden_dropout", 0.0) or reading.number("attention_dropout", 0.0):
        fields["training.dropout"] = True
    _read_task(reading, fields)


def _read_batch(reading: Reading, fields: dict[str, Any]) -> None:
    """As DeepSpeed: the batch is the product of microbatch, accumulation and replicas; one may be left out."""
    micro = reading.count("train_micro_batch_size_per_gpu", None)
    times, whole = reading.count("gradient_accumulation_steps", 1), reading.count("train_batch_size", None)
    ranks = reading.data_ranks(fields)
    if micro is None and whole is None:
        reading.notes.append("no batch size is given, as where a file holds the model alone: one sequence is assumed")
        micro = 1
    if micro is None:
        fields["training.global_batch"] = whole
        if ranks is not None and whole % (ranks * times) == 0:
            fields["strategy.microbatch"] = whole // (ranks * times)
        return
    fields["strategy.microbatch"] = micro
    if whole is not None:
        fields["training.global_batch"] = whole
    elif ranks is not None:
        fields["training.global_batch"] = micro * times * ranks
    if reading.has("global_num_gpus"):
        reading.devices = reading.count("global_num_gpus")
    elif whole is not None and whole % (micro * times) == 0:
        reading.devices = whole // (micro * times) * product_of(fields, "tp", "pp")


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    word = str(reading.value("precision", "")).lower()
    half, brain = reading.flag("fp16.enabled", reading.flag("fp16.fp16")), reading.flag("bf16.enabled")
    fields["training.precision"] = (
        "bf16" if brain or word == "bfloat16" else "fp16" if half or word == "fp16" else "fp32"
    )
    if str(reading.value("data_types.grad_accum_dtype", "")) == "fp32" and fields["training.precision"] == "bf16":
        fields["training.precision"] = "bf16-fp32-grads"
    if reading.flag("fp32_allreduce"):
        fields["stack.gradient_reduce"] = "fp32"


def _read_task(reading: Reading, fields: dict[str, Any]) -> None:
    word = reading.text("train_impl", "normal")
    if word == "dpo":
        fields["training.task"] = "dpo"
    elif word != "normal":
        reading.notes.append(f"train_impl {word}: only the update of the policy is priced, as supervised training")


def _model(reading: Reading) -> Mapping[str, Any]:
    """The model's fields; its vocabulary is its tokenizer's, and in no file."""
    if reading.value("attention_config") is not None and "mamba" in str(reading.value("attention_config")):
        raise SpecError("attention_config", "mamba: state-space layers have no price", "give a model of attention")
    if "rwkv" in str(reading.value("attention_config", "")) or "gmlp" in str(reading.value("attention_config", "")):
        raise SpecError("attention_config", "layers without attention have no price", "give a model of attention")
    hidden, heads = reading.count("hidden_size", None), reading.count("num_attention_heads", None)
    layers = reading.count("num_layers", None)
    for key, value in (("num_layers", layers), ("hidden_size", hidden), ("num_attention_heads", heads)):
        if value is None:
            raise SpecError(key, "is missing", "the file describes a model by it; or give ⟨model=pythia-1b⟩")
    activation = reading.text("activation", "gelu").lower()
    if activation not in _ACTIVATIONS:
        reading.notes.append(f"activation {activation}: priced as {'swiglu' if activation in _GATED else 'gelu'}")
    padded = reading.count("padded_vocab_size", None)
    if padded is None:
        reading.notes.append(f"the vocabulary is its tokenizer's: {VOCABULARY:,} tokens are assumed (model.vocab)")
    norm = reading.text("norm", "layernorm").lower()
    if norm not in _NORMS:
        reading.notes.append(f"norm {norm}: priced as layernorm")
    parallel, linear = reading.flag("gpt_j_residual"), reading.flag("use_bias_in_attn_linear", True)
    experts = _experts(reading, hidden)
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": reading.count("num_kv_heads", heads),
        "ffn": _inner(reading, hidden, gated=activation in _GATED), "vocab": padded or VOCABULARY,
        "max_seq": reading.count("max_position_embeddings", 2048),
        "activation": _ACTIVATIONS.get(activation, "swiglu" if activation in _GATED else "gelu"),
        "norm": _NORMS.get(norm, "layernorm"), "positions": reading.choice("pos_emb", _POSITIONS, "learned"),
        "tied_embeddings": not reading.flag("no_weight_tying"), "parallel_block": parallel,
        "norms_per_layer": 1 if parallel and reading.flag("gpt_j_tied") else 2, "qkv_bias": linear,
        "attention_out_bias": linear, "mlp_bias": reading.flag("use_bias_in_mlp", True),
        "norm_bias": reading.flag("use_bias_in_norms", True), "qk_norm": reading.flag("use_qk_layernorm"),
        **({"sliding_window": reading.count("sliding_window_width")} if reading.has("sliding_window_width") else {}),
        **({"moe": experts} if experts else {}),
        "numerics.rotary_share": float(reading.number("rotary_pct", 1.0)),
        "numerics.rope_theta": float(reading.number("rotary_emb_base", 10_000)),
    }  # fmt: skip


def _inner(reading: Reading, hidden: int, *, gated: bool) -> int:
    """Inner features of the MLP (megatron/model/transformer.py, ParallelMLP): a gate takes a third of those given."""
    given = reading.count("intermediate_size", None)
    if given is None:
        given = int(float(reading.number("expansion_factor", 4)) * hidden)
    multiple: int = reading.count("mlp_multiple_of", 256 if gated else 1)
    inner = int(given * 2 / 3) // 2 if gated else int(given)
    return multiple * math.ceil(inner / multiple)


def _experts(reading: Reading, hidden: int) -> dict[str, Any] | None:
    number = reading.count("moe_num_experts", 1)
    every, chosen = reading.count("moe_expert_interval", 1), reading.count("moe_top_k", 1)
    if number == 1:
        return None
    return {"experts": number, "top_k": chosen, "ffn": 4 * hidden, "every": every}


GPT_NEOX = recipes.reader(
    "gpt-neox",
    "GPT-NeoX",
    _interpret,
    format=replace(recipes.RECIPE, suffixes=(".yml", ".yaml"), parse=_parse),
    signature=("pipe_parallel_size", "model_parallel_size"),
    stacks=("deepspeed",),
    carries_model=True,
    learning=("optimizer.params", "weight_decay", "gradient_clipping", "lr_decay_style", "train_iters"),
    moves=(
        Move({"checkpoint_activations": True}),
        Move({"checkpoint_activations": False}),
        *(Move({"zero_optimization.stage": stage}, lambda job: job.strategy.pp == 1) for stage in (2, 3)),
        Move({"zero_optimization.stage": 1}),
    ),
    microbatch_key="train_micro_batch_size_per_gpu",
    accumulation_key="gradient_accumulation_steps",
)
