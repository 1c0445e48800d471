"""TorchTitan's configuration of a run: the TOML of its 0.2 line, and the JSON that a run saves.

0.2 saves the fields of its TOML (`--job.save_config_file`). Later versions have no files: a run is a Python function,
and what it returns is saved by `--debug.save_config_file`, the model spelled out, the batch counted in tokens. It is
turned into the settings of 0.2 here, as far as it says the same (torchtitan/trainer.py and config/configs.py, commit
b5bcd76c66d0, August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.documents import JSON, TOML, Format, Names, Settings, flatten, without_comments
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json
from shardwise.spec.model import Model

SHAPE, TITLE = "model_spec.shape", "TorchTitan configuration"
# Models of TorchTitan that are not language models.
_OTHER_MODELS = {"flux": "is a model of pictures", "vlm": "reads pictures too"}
_RATE = ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor")
_SAME = ("max_norm", "steps", "enable_cpu_offload", "dtype", "mixed_precision_param")


def _parse(text: str, what: str, names: Names) -> Settings:
    if not text.lstrip().startswith("{"):
        settings = TOML.parse(text, what, names)
    else:
        settings = JSON.parse(text, what, names)
        if any(key.startswith("model_spec.") for key in settings):
            settings = _settings_of_run(parse_json(without_comments(text)), names)
        settings = {key: value for key, value in settings.items() if value is not None}
    name = settings.get("model.name")
    if isinstance(name, str) and name in _OTHER_MODELS:
        raise SpecError("model.name", f"{name} {_OTHER_MODELS[name]}", "only language models are read")
    return settings


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _whole(tree: Mapping[str, Any], section: str, name: str, usual: int) -> int:
    value = _section(tree, section).get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise SpecError(f"{section}.{name}", f"{value} is not a count", "use 1 or more")
    return value


def _settings_of_run(tree: Mapping[str, Any], names: Names) -> Settings:
    spec, parallelism = _section(tree, "model_spec"), _section(tree, "parallelism")
    stages = _whole(tree, "parallelism", "pipeline_parallel_degree", 1)
    settings: Settings = {
        "model.name": spec.get("name"),
        "model.flavor": spec.get("flavor"),
        SHAPE: _shape_or_reason(_section(spec, "model")),
        **_batch(tree),
        **{f"training.{name}": _section(tree, "training").get(name) for name in _SAME},
        **{f"lr_scheduler.{name}": _section(tree, "lr_scheduler").get(name) for name in _RATE},
        **_optimizer(_section(tree, "optimizer")),
        **_recompute(tree.get("activation_checkpoint")),
        "parallelism.enable_async_tensor_parallel": _section(tree, "compile").get("enable_async_tensor_parallel"),
    }
    for name, value in flatten(parallelism, TITLE, "parallelism.").items() if parallelism else ():
        without_effect = value == "" or (stages == 1 and "pipeline_parallel" in name)
        if name in names and name not in settings and not without_effect:
            settings[name] = value
    return settings


def _batch(tree: Mapping[str, Any]) -> Settings:
    """Sequences, which are as long as the longest context; a microbatch of fewer tokens is one sequence."""
    longest = _whole(tree, "training", "max_context_length", 2048)
    tokens = _whole(tree, "training", "num_tokens_per_microbatch_per_dp_rank", 16384)
    step = _whole(tree, "training", "num_tokens_per_train_step", -1)
    stages = _whole(tree, "parallelism", "pipeline_parallel_degree", 1)
    seq, micro = min(longest, tokens), max(1, tokens // longest)
    settings: Settings = {"training.seq_len": seq, "training.global_batch_size": step if step < 0 else step // seq}
    if stages > 1:
        settings["parallelism.pipeline_parallel_microbatch_size"] = micro
        micro *= _whole(tree, "parallelism", "num_pp_microbatches", 1)
    return {**settings, "training.local_batch_size": micro}


def _optimizer(section: Mapping[str, Any]) -> Settings:
    groups = section.get("param_groups")
    last = groups[-1] if isinstance(groups, list) and groups and isinstance(groups[-1], Mapping) else {}
    values, betas = _section(last, "optimizer_kwargs"), _section(last, "optimizer_kwargs").get("betas")
    first, second = betas if isinstance(betas, list) and len(betas) == 2 else (None, None)
    return {
        "optimizer.name": last.get("optimizer_name"),
        "optimizer.lr": values.get("lr"),
        "optimizer.beta1": first,
        "optimizer.beta2": second,
        "optimizer.eps": values.get("eps"),
        "optimizer.weight_decay": values.get("weight_decay"),
    }


def _recompute(policy: object) -> Settings:
    """Its class is not saved, but each has other fields."""
    if not isinstance(policy, Mapping):
        return {"activation_checkpoint.mode": "none"}
    if "memory_budget" in policy:
        return {"activation_checkpoint.mode": "memory_budget"}
    if "force_recompute_mm_shapes_by_fqns" in policy:
        return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    return {"activation_checkpoint.mode": "full"}


# -- the model -------------------------------------------------------------------------------------------------


def _shape_or_reason(model: Mapping[str, Any]) -> dict[str, Any] | str:
    """The fields of a model here, or why it is none."""
    layers = model.get("layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, Mapping) for layer in layers):
        return "the file has no layers"
    if any(not isinstance(layer.get("attention"), Mapping) for layer in layers):
        return "some of its layers have no softmax attention"
    try:
        return _shape(model, layers)
    except (KeyError, TypeError, AttributeError) as error:
        return f"its layers are not understood ({error})"


def _shape(model: Mapping[str, Any], layers: list[Any]) -> dict[str, Any]:
    first, attention = layers[0], layers[0]["attention"]
    dense = next((layer["feed_forward"] for layer in layers if layer.get("feed_forward")), None)
    experts = next((layer["moe"] for layer in layers if layer.get("moe")), None)
    rope = attention.get("rope") or {}
    shape: dict[str, Any] = {
        "layers": len(layers), "hidden": model["dim"], "vocab": model["vocab_size"], "heads": attention["n_heads"],
        "max_seq": rope.get("max_context_length", 131072), "activation": "swiglu", "norm": "rmsnorm",
        "tied_embeddings": bool(model.get("enable_weight_tying")), "qk_norm": attention.get("qk_norm") is not None,
        "attention_out_bias": bool(attention["wo"].get("bias")), "mtp_layers": len(model.get("mtp_layers") or ()),
        "numerics": {"rope_theta": rope.get("theta", 10_000.0), "norm_epsilon": first["attention_norm"]["eps"]},
    }  # fmt: skip
    shape["ffn"] = (dense or {"w1": {"out_features": _expert_width(experts)}})["w1"]["out_features"]
    if "kv_lora_rank" in attention:
        shape["mla"] = {
            "kv_rank": attention["kv_lora_rank"], "nope_dim": attention["qk_nope_head_dim"],
            "rope_dim": attention["qk_rope_head_dim"], "value_dim": attention["v_head_dim"],
            **({"q_rank": attention["q_lora_rank"]} if attention.get("q_lora_rank") else {}),
        }  # fmt: skip
    else:
        projected = attention["qkv_linear"]
        shape["kv_heads"] = attention.get("n_kv_heads") or attention["n_heads"]
        shape["head_dim"] = projected["head_dim"]
        shape["qkv_bias"] = any(isinstance(part, Mapping) and bool(part.get("bias")) for part in projected.values())
    windows = [layer["attention"].get("sliding_window_size") for layer in layers]
    if any(windows):
        shape["sliding_window"] = next(window for window in windows if window)
        shape["sliding_window_every"] = max(1, round(len(layers) / sum(map(bool, windows))))
    if experts is not None:
        shape["moe"], routed = _experts(experts, layers), experts["router"]
        shape["numerics"] |= {"renormalise_top_k": bool(routed["route_norm"]), "router_scale": routed["route_scale"]}
    return shape


def _expert_width(experts: Any) -> Any:
    return experts["routed_experts"]["inner_experts"]["hidden_dim"]


def _experts(experts: Mapping[str, Any], layers: list[Any]) -> dict[str, Any]:
    kinds = [bool(layer.get("moe")) for layer in layers]
    dense = kinds.index(True)
    if not all(kinds[dense:]):
        raise TypeError("experts in some layers only")
    router, shared = experts["router"], experts.get("shared_experts")
    return {
        "experts": experts["num_experts"], "top_k": router["top_k"], "ffn": _expert_width(experts),
        "shared_ffn": shared["w1"]["out_features"] if shared else 0, "shared_gate": bool(shared and "gate" in shared),
        "dense_layers": dense, "router": router["score_func"],
        "router_logit_bias": bool(router["gate"].get("bias")),
        "groups": router.get("num_expert_groups") or 1, "groups_used": router.get("num_limited_groups") or 1,
    }  # fmt: skip


FILES = Format((*TOML.suffixes, *JSON.suffixes), _parse, TOML.render)

# -- The models that TorchTitan ships, by name and flavor: presets here, or shapes that are small and only its own

# Our presets by the model name and flavor of TorchTitan 0.2.2, the first of each as which a flavor is read. All its
# Llamas stretch rotary positions as Llama 3.1 does (``RoPEScalingArgs`` in models/llama3/model/args.py).
FLAVORS = {
    "llama3.1-8b": ("llama3", "8B"),
    "llama3-8b": ("llama3", "8B"),
    "llama3.1-70b": ("llama3", "70B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v2": ("deepseek_v3", "236B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
}
_DEBUG_QWEN: dict[str, Any] = {
    "layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 2048,
    "max_seq": 4096, "activation": "swiglu", "norm": "rmsnorm", "qk_norm": True, "numerics": {"rope_theta": 1_000_000},
}  # fmt: skip
# Those that its own tests train (torchtitan/models/*/__init__.py).
_DEBUG: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("llama3", "debugmodel"): {
        "layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048, "max_seq": 131072, "activation": "swiglu",
        "norm": "rmsnorm", "numerics": {
            "rope_theta": 500_000, "rope_scaling": {"kind": "llama3", "factor": 8, "original_seq": 8192}},
    },
    ("deepseek_v3", "debugmodel"): {
        "layers": 6, "hidden": 256, "heads": 16, "ffn": 1024, "vocab": 2048, "max_seq": 16384, "activation": "swiglu",
        "norm": "rmsnorm", "mla": {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "moe": {"experts": 8, "top_k": 3, "ffn": 256, "shared_ffn": 512, "dense_layers": 1},
        "numerics": {"renormalise_top_k": False, "rope_scaling": {
            "kind": "yarn", "factor": 40, "original_seq": 4096, "mscale": 0.7, "mscale_all": 0.7}},
    },
    ("qwen3", "debugmodel"): {**_DEBUG_QWEN, "tied_embeddings": True},
    ("qwen3", "debugmodel_moe"): {**_DEBUG_QWEN, "moe": {"experts": 64, "top_k": 8, "ffn": 768}},
    ("gpt_oss", "debugmodel"): {
        "layers": 4, "hidden": 256, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880, "vocab": 201088,
        "max_seq": 131072, "activation": "swiglu", "norm": "rmsnorm", "qkv_bias": True, "attention_out_bias": True,
        "mlp_bias": True, "attention_sinks": True, "sliding_window": 128, "sliding_window_every": 2,
        "moe": {"experts": 8, "top_k": 4, "ffn": 2880, "router_logit_bias": True},
        "numerics": {"rope_theta": 150_000, "swiglu_limit": 7},
    },
}  # fmt: skip


def model_of(name: str, flavor: str) -> Model | None:
    """The model that TorchTitan has under this name, whatever attention kernel the flavor chooses."""
    flavor = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
    preset = next((ours for ours, theirs in FLAVORS.items() if theirs == (name, flavor)), None)
    if preset is not None:
        return presets.resolve("model", Model, preset)
    shape = _DEBUG.get((name, flavor))
    return None if shape is None else Model.from_dict({"name": _title(name, flavor), **shape}, "model")


def _title(name: str, flavor: str) -> str:
    return f"{name}-{flavor}".replace("_", "-")


def flavor_named(ours: str) -> tuple[str, str] | None:
    """TorchTitan's name and flavor of a model that has one of ours."""
    return FLAVORS.get(ours) or next((pair for pair in _DEBUG if _title(*pair) == ours), None)


def known_flavors(name: str) -> str:
    """The flavors of a model, or the models if none is of that name."""
    pairs = [*FLAVORS.values(), *_DEBUG]
    flavors = dict.fromkeys(flavor for model, flavor in pairs if model == name)
    return f"those of {name}: {', '.join(flavors)}" if flavors else "models " + ", ".join(dict.fromkeys(dict(pairs)))
