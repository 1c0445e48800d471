"""MaxText: its YAML files, and scripts that start its ``train`` with ``key=value``. They are read, not written.

The mesh has an axis for each kind of parallelism, inside a slice (``ici_``) and between slices (``dcn_``).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.target import Move, Reading
from shardwise.spec.errors import SpecError, shown

# -- what a layer keeps for its backward pass (maxtext/layers/decoders.py, get_remat_policy, at e591f30) --------

INPUT, PROJECTIONS_IN, CONTEXT, PROJECTION_OUT, UP = "layer input", "projections in", "context", "projection out", "up"
PROJECTIONS = {PROJECTIONS_IN, PROJECTION_OUT}
_POLICIES: dict[str, set[str]] = {
    "minimal_with_context": {*PROJECTIONS, UP, CONTEXT}, "minimal_flash": {*PROJECTIONS, UP, CONTEXT},
    "minimal_with_context_and_quantization": {*PROJECTIONS, UP, CONTEXT}, "minimal": {*PROJECTIONS, UP},
    "minimal_with_quantization": {*PROJECTIONS, UP}, "minimal_offloaded": {*PROJECTIONS, UP},
    "save_dot_with_context_except_mlp": {*PROJECTIONS, CONTEXT}, "save_dot_except_mlpwi": PROJECTIONS,
    "save_dot_except_mlp": PROJECTIONS, "save_qkv_proj": {PROJECTIONS_IN}, "save_out_proj": {PROJECTION_OUT},
    "qkv_proj_offloaded": {PROJECTIONS_IN}, "full": set(),
}  # fmt: skip
_TENSORS = {
    "decoder_layer_input": INPUT, "query_proj": PROJECTIONS_IN, "qkv_proj": PROJECTIONS_IN, "mla_q": PROJECTIONS_IN,
    "out_proj": PROJECTION_OUT, "attention_out": PROJECTION_OUT, "context": CONTEXT, "mlpwi": UP, "mlpwi_0": UP,
    "moe_mlpwi_0": UP,
}  # fmt: skip
_FOLLOWING = ("key_proj", "value_proj", "kv_proj", "mla_kv", "query_wa_proj", "kv_wa_proj", "mlpwi_1", "moe_mlpwi_1",
              "mlpwo", "moe_mlpwo", "engram", "indexer_cutoff_threshold")  # fmt: skip


def recomputed(kept: Collection[str], *, input_on_host: bool, experts: bool) -> dict[str, Any]:
    """The fields of the strategy that are nearest to a policy that keeps some tensors of a layer.

    What makes a projection again, or routed experts, is nearer to a whole layer than to any of the operators.
    """
    fields: dict[str, Any] = {"recompute": "full"}
    if set(kept) >= PROJECTIONS and (not experts or UP in kept):
        again = {"attention": CONTEXT not in kept, "norm": True, "activation": True, "mlp-up": UP not in kept}
        operators = [operator for operator, is_repeated in again.items() if is_repeated]
        fields = {"recompute": "selective", "recompute_operators": operators}
    return fields | ({"offload": {"activations": 1.0}} if input_on_host else {})


# -- the file ------------------------------------------------------------------------------------------------------

_LEARNING = {"learning_rate": "learning_rate", "decay": "adam_weight_decay", "beta1": "adam_b1", "beta2": "adam_b2",
             "epsilon": "adam_eps", "clip_norm": "gradient_clipping_threshold", "kind": "lr_schedule_type"}  # fmt: skip
_OPTIMIZERS = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd", "muon": "muon"}
_QUANTIZED = {"": "bf16", "int8": "int8", "int8w": "int8", "fp8": "fp8", "fp8_full": "fp8-delayed", "fp8_gpu": "fp8",
              "fp8_nanoo": "fp8", "nanoo_fp8": "fp8", "te_fp8_delayedscaling": "fp8-delayed", "te_nvfp4": "nvfp4",
              "te_fp8_currentscaling": "fp8", "te_mxfp8": "mxfp8", "te_noquant": "bf16"}  # fmt: skip
_CONTEXT = {"all_gather": "all-gather", "ring": "ring", "ulysses": "ulysses"}
MODELS = {"deepseek3-671b": "deepseek-v3", "deepseek3-671b-2dfsdp": "deepseek-v3", "deepseek2-16b": "deepseek-v2-lite",
           "deepseek3-671b-batchsplit": "deepseek-v3", "deepseek2-236b": "deepseek-v2", "kimi-k2-1t": "kimi-k2",
           "qwen3-480b-a35b": "qwen3-coder-480b-a35b"}  # fmt: skip
# The batch is split over all of these.
_OF_BATCH = ("data", "fsdp", "fsdp_transpose", "expert")
_AXES = (*_OF_BATCH, "tensor", "tensor_sequence", "context", "context_usp_ulysses", "pipeline")
_UNPRICED = {
    "num_pipeline_repeats": "stages are priced in one round, whose bubble is larger",
    "enable_diloco": "workers that synchronise rarely are priced as if they did every step",
    "mtp_num_layers": "prediction layers are not priced, which take memory and time",
    "trainable_parameters_mask": "priced as if all weights were trained, an upper bound",
    "use_batch_split_schedule": "the exchange of tokens is priced without overlap, which takes longer",
    "capacity_factor": "experts that drop tokens are priced as if they dropped none, an upper bound",
    "use_multimodal": "the encoder of images is not priced, which takes memory and time",
    "moba": "attention to some blocks is priced as attention to all, an upper bound",
    "use_indexer": "the indexer is not priced, and attention as if it read every key",
    "enable_rampup_batch_size": "steps are priced at the full batch",
    "pipeline_fsdp_ag_once": "weights are gathered once for all microbatches: more memory, less time than is priced",
    "custom_mesh_and_rule": "another table of what is split over which axis is not read",
    "num_generations": "only the update of the policy is priced: generation and rewards take longer",
    "teacher_overrides": "a teacher is not priced, which takes memory and time",
}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    _read_base(reading)
    _read_model(reading, fields)
    model = recipes.model_of(reading, fields)
    fields["training.seq"] = reading.count("max_target_length", 2048)
    fields["training.task"] = "dpo" if reading.flag("use_dpo") else "sft" if reading.flag("use_sft") else "pretrain"
    _read_layout(reading, fields)
    _read_precision(reading, fields)
    experts = reading.integer("num_experts", 1) > 1 or (model is not None and model.moe is not None)
    _read_remat(reading, fields, experts=experts)
    _read_adapters(reading, fields)
    recipes.read_learning(reading, fields, _LEARNING)
    recipes.read_steps(reading, fields, "steps")
    fields["training.attention"] = "unfused" if reading.text("attention", "flash") == "dot_product" else "flash"
    dropout, rate = reading.flag("enable_dropout", True), reading.number("dropout_rate", 0.0)
    fields["training.dropout"] = bool(dropout and rate)
    for key, part in (("optimizer_memory_host_offload", "optimizer"), ("parameter_memory_host_offload", "weights")):
        if reading.flag(key):
            fields[f"strategy.offload.{part}"] = 1.0
    if reading.count("num_vocab_tiling", 1) > 1:
        fields.update(recipes.LOSS_IN_PIECES)
    if fields["training.task"] != "pretrain":
        recipes.note_lengths(reading, packed=reading.flag("packing", True), tokens=fields["training.seq"])
    recipes.note(reading, _UNPRICED)


def _read_base(reading: Reading) -> None:
    """The file that this one changes: ``base.yml`` holds the defaults, another one is read where it lies beside it."""
    named = reading.text("base_config")
    if named is None or named.rpartition("/")[2] in ("base.yml", "base.yaml"):
        return
    text = reading.beside(named) or reading.beside(named.rpartition("/")[2])
    if text is None:
        reading.notes.append(f"base_config {shown(named)} is not beside this file: what it sets is not read")
        return
    for key, value in recipes.RECIPE.parse(text, named, MAXTEXT.names).items():
        reading.settings.setdefault(key, value)


# -- the model ---------------------------------------------------------------------------------------------------

_MODEL_BLOCKS = ("default", "llama2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
                 "gpt3", "deepseek", "gpt_oss")  # fmt: skip
_ACTIVATIONS = {("silu", "linear"): "swiglu", ("sigmoid", "linear"): "swiglu", ("gelu", "linear"): "geglu",
                ("gelu",): "gelu", ("relu",): "relu"}  # fmt: skip


def _read_model(reading: Reading, fields: dict[str, Any]) -> None:
    named = reading.text("model_name", reading.text("student_overrides.model_name", "default"))
    if named != "default":
        recipes.read_model_called(reading, fields, "model_name", MODELS.get(named, named))
        return
    block = reading.text("decoder_block", "llama2")
    if reading.model is None and block not in _MODEL_BLOCKS:
        reading.no_model = f"decoder_block {shown(block)} has layers that no key describes"
    elif reading.model is None:
        if not (reading.has("base_emb_dim") or reading.has("global_parameter_scale")):
            reading.notes.append("no model_name: priced is the small model that base.yml describes")
        fields.update({f"model.{name}": value for name, value in _model(reading, block).items()})


def _model(reading: Reading, block: str) -> dict[str, Any]:
    """The model's fields, by the defaults of ``base.yml``; one number may scale several (types.py)."""
    power = math.log2(reading.count("global_parameter_scale", 1))
    if power != int(power):
        raise SpecError("global_parameter_scale", "is not a power of two", "set base_emb_dim and the others instead")
    base, rest = divmod(int(power), 3)
    wide, deep, embedded = 2 ** (base + (rest > 0)), 2**base, 2 ** (base + (rest > 1))
    gpt3, behind = block == "gpt3", reading.flag("use_post_attn_norm") + reading.flag("use_post_ffw_norm")
    layers = reading.count("base_num_decoder_layers", 16) * deep * (2 if block == "gemma2" else 1)
    hidden, heads = reading.count("base_emb_dim", 2048) * embedded, reading.count("base_num_query_heads", 16) * wide
    ffn = reading.count("base_mlp_dim", 7168) * wide
    words = tuple(reading.value("mlp_activations", ["silu", "linear"]))
    if words not in _ACTIVATIONS:
        raise SpecError("mlp_activations", f"{shown(list(words))} is not priced", "use ['silu', 'linear'] or ['gelu']")
    positions, biased = reading.integer("trainable_position_size", -1), reading.flag("attention_bias") or gpt3
    window = reading.integer("sliding_window_size", 0)
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn,
        "kv_heads": reading.count("base_num_kv_heads", 16) * wide, "head_dim": reading.count("head_dim", 128),
        "vocab": reading.count("vocab_size", 32_000), "activation": _ACTIVATIONS[words],
        "norm": "layernorm" if gpt3 else "rmsnorm", "positions": "learned" if positions > 0 else "rope",
        **({"max_seq": positions} if positions > 0 else {}),
        "tied_embeddings": reading.flag("logits_via_embedding"), "qkv_bias": biased,
        "attention_out_bias": biased and block in ("gpt3", "gpt_oss"), "mlp_bias": reading.flag("mlp_bias") or gpt3,
        "qk_norm": reading.flag("use_qk_norm") or block == "gemma3", "attention_sinks": reading.flag("attention_sink"),
        "norms_per_layer": 2 + behind,
        **({"sliding_window": window, "sliding_window_every": {"gemma2": 2, "gpt_oss": 2, "gemma3": 6}.get(block, 1)}
           if window > 0 else {}),
        **_latent(reading), **_experts(reading, ffn, wide),
    }  # fmt: skip


def _latent(reading: Reading) -> dict[str, Any]:
    sizes = {"nope_dim": reading.count("qk_nope_head_dim", 128), "rope_dim": reading.count("qk_rope_head_dim", 64),
             "value_dim": reading.count("v_head_dim", 128), "kv_rank": reading.count("kv_lora_rank", 512),
             "q_rank": reading.integer("q_lora_rank", 0) or None}  # fmt: skip
    return {"mla": sizes} if reading.text("attention_type", "global") == "mla" else {}


def _experts(reading: Reading, ffn: int, wide: int) -> dict[str, Any]:
    number, width = reading.count("num_experts", 1), reading.integer("base_moe_mlp_dim", -1)
    inner = width * wide if width > 0 else ffn
    score = reading.text("routed_score_func", "") or "softmax"
    moe = {"experts": number, "top_k": reading.count("num_experts_per_tok", 1), "ffn": inner,
           "shared_ffn": reading.integer("shared_experts", 0) * inner, "router": score,
           "router_bias": reading.flag("routed_bias") and score == "sigmoid",
           "dense_layers": reading.integer("first_num_dense_layers", 0)}  # fmt: skip
    return {"moe": moe} if number > 1 else {}


# -- the mesh ----------------------------------------------------------------------------------------------------

_CORES = ("v2", "v3", "v4", "v5p")  # the names of whose topologies count two cores a chip


def _read_layout(reading: Reading, fields: dict[str, Any]) -> None:
    inside = {axis: reading.integer(f"ici_{axis}_parallelism", -1 if axis == "fsdp" else 1) for axis in _AXES}
    between = {axis: reading.integer(f"dcn_{axis}_parallelism", -1 if axis == "data" else 1) for axis in _AXES}
    slices = reading.integer("num_slices", -1)
    slices = max(1, slices if slices > 0 else reading.integer("compile_topology_num_slices", -1))
    if reading.text("hardware", "tpu").startswith("gpu") and reading.cluster is not None:
        slices = max(slices, reading.cluster.nodes)  # of GPUs a node is a slice
    devices = _devices(reading, slices)
    if devices is None and -1 not in inside.values():
        between = {axis: 1 if size == -1 else size for axis, size in between.items()}
        devices = math.prod(inside.values()) * math.prod(between.values())
    if devices is not None:
        rest = math.prod(size for size in between.values() if size > 0)
        if -1 not in inside.values():
            slices = devices // math.prod(inside.values())
        elif -1 not in between.values():
            slices = rest
        between = {axis: slices // rest if size == -1 else size for axis, size in between.items()}
        held = math.prod(size for size in inside.values() if size > 0)
        inside = {axis: devices // slices // held if size == -1 else size for axis, size in inside.items()}
        sizes = {axis: inside[axis] * between[axis] for axis in _AXES}
        if math.prod(sizes.values()) != devices:
            least = rest * held
            raise SpecError("ici_fsdp_parallelism", f"and the other axes do not make {devices} devices of {least} each",
                            f"correct them, or use ⟨gpus={least}⟩")  # fmt: skip
        reading.devices = devices
    else:
        sizes = {axis: 1 if -1 in (inside[axis], between[axis]) else inside[axis] * between[axis] for axis in _AXES}
    tp, pp = sizes["tensor"] * sizes["tensor_sequence"], sizes["pipeline"]
    cp, sharded = sizes["context"] * sizes["context_usp_ulysses"], sizes["fsdp"] * sizes["fsdp_transpose"]
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.pp": pp, "strategy.ep": sizes["expert"]})
    # Embedding and norms are split over `tensor` too, as the sequence is over `tensor_sequence` (logical_axis_rules).
    fields["strategy.sequence_parallel"] = tp > 1
    if cp > 1:
        word = reading.text("context_parallel_strategy", "all_gather")
        fields["strategy.context_method"] = _CONTEXT.get(word, "ring")
    over_data = reading.flag("shard_optimizer_over_data")
    gathers = devices is None or sharded * cp * sizes["expert"] > 1
    fields["strategy.zero"] = 3 if gathers else 1 if over_data else 0
    if gathers and sizes["data"] > 1:
        fields["strategy.shard_group"] = sharded * cp * sizes["expert"]
    if pp > 1:
        fields["strategy.schedule"] = "gpipe"  # the backward pass is that of the whole loop
    _read_batch(reading, fields, devices, tp * cp * pp, pp)


def _devices(reading: Reading, slices: int) -> int | None:
    if reading.cluster is not None:
        return reading.cluster.devices
    generation, _, size = reading.text("compile_topology", "").rpartition("-")
    if not size.isdigit():
        return None
    return int(size) // (2 if generation in _CORES else 1) * slices


def _read_batch(reading: Reading, fields: dict[str, Any], devices: int | None, model_ranks: int, pp: int) -> None:
    each, times = reading.number("per_device_batch_size", 12.0), reading.count("gradient_accumulation_steps", 1)
    parts = reading.integer("num_pipeline_microbatches", -1)
    parts = parts if parts > 0 else pp
    size = each * model_ranks / parts
    if size < 1 or size != int(size):
        problem = f"{each} are {size:g} sequences at a time for the {model_ranks} devices that share them"
        raise SpecError("per_device_batch_size", problem, "give a whole number of sequences to each data-parallel rank")
    fields["strategy.microbatch"] = int(size)
    if devices is not None:
        fields["training.global_batch"] = int(devices * each) * times


# -- formats, recomputation, adapters ----------------------------------------------------------------------------


def _read_precision(reading: Reading, fields: dict[str, Any]) -> None:
    word = reading.text("quantization", "").lower()
    if word not in _QUANTIZED:
        raise SpecError("quantization", f"{shown(word)} is not priced", f"priced are {', '.join(_QUANTIZED)[2:]}")
    full = reading.text("dtype", "bfloat16") == "float32"
    fields["training.precision"] = "fp32" if full else _QUANTIZED[word]
    fields["training.optimizer"] = reading.choice("opt_type", _OPTIMIZERS, "adamw")
    weights = reading.text("weight_dtype", "float32")
    if weights != "float32" and not full:
        fields.update({"stack.masters": "none", "stack.sharded_parameters": "16-bit"})
        if fields["training.optimizer"] == "adamw" and reading.text("mu_dtype", "") in ("", "bfloat16"):
            fields["training.optimizer"] = "adamw-bf16-moments"
    elif reading.text("mu_dtype", "") not in ("", "float32"):
        reading.notes.append("mu_dtype: the first moment is priced in fp32, which takes more memory")


def _read_remat(reading: Reading, fields: dict[str, Any], *, experts: bool) -> None:
    policy = reading.text("remat_policy", "full")
    if policy == "none":
        return
    on_host: set[str] = {PROJECTIONS_IN} if policy == "qkv_proj_offloaded" else set()
    if policy == "custom":
        where = {key: reading.text(key, "device" if key == "decoder_layer_input" else "remat") for key in _TENSORS}
        kept = {tensor for key, tensor in _TENSORS.items() if where[key] != "remat"}
        on_host = {tensor for key, tensor in _TENSORS.items() if where[key] == "offload"}
    elif policy in _POLICIES:
        kept = _POLICIES[policy]
    else:
        raise SpecError("remat_policy", f"{shown(policy)} is not known", f"use one of {', '.join(_POLICIES)}, custom")
    reading.used |= {*_TENSORS, *_FOLLOWING} if policy == "custom" else set()
    whole = policy == "minimal_offloaded" or INPUT in on_host
    found = recomputed(kept, input_on_host=whole, experts=experts)
    if whole:
        fields["strategy.offload.activations"] = 1.0
    fields["strategy.recompute"] = found["recompute"]
    if "recompute_operators" in found:
        fields["strategy.recompute_operators"] = found["recompute_operators"]
    elif kept - {INPUT}:
        reading.notes.append(f"remat_policy {policy}: priced as if every layer were repeated whole, which takes longer")
    if on_host - {INPUT}:
        reading.notes.append(f"remat_policy {policy}: what goes to the host is priced as made again, not as copied")


def _read_adapters(reading: Reading, fields: dict[str, Any]) -> None:
    if not reading.flag("lora.enable_lora"):
        return
    path, words = reading.text("lora.lora_module_path", ""), {"query": "q_proj", "key": "k_proj", "value": "v_proj",
                                                            "out": "o_proj", "wi": "mlp", "wo": "mlp"}  # fmt: skip
    fields.update({
        "training.adapters.rank": reading.count("lora.lora_rank"),
        "training.adapters.alpha": float(reading.number("lora.lora_alpha", 0.0)) or 1.0,
        "training.adapters.targets": sorted({ours for word, ours in words.items() if word in path}) or ["all-linear"],
    })  # fmt: skip
    if reading.text("lora.lora_weight_qtype") is not None:
        fields["training.base_precision"] = "nf4"


MAXTEXT = recipes.reader(
    "maxtext", "MaxText", _interpret,
    programs=("maxtext",), defaults_in=("base.yml",),
    signature=("per_device_batch_size", "ici_fsdp_parallelism", "base_emb_dim", "base_num_decoder_layers",
               "max_target_length", "base_config", "use_sft"),
    stacks=("maxtext",), carries_model=True, learning=("learning_rate", "adam_", "steps", "lr_schedule_type"),
    moves=(*(Move({"remat_policy": policy}) for policy in ("full", "save_qkv_proj", "minimal_with_context")),
           Move({"optimizer_memory_host_offload": True})),
    microbatch_key="per_device_batch_size", accumulation_key="gradient_accumulation_steps",
)  # fmt: skip
