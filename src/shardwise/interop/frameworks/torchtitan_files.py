"""TorchTitan's configuration of a run: the TOML of its 0.2 line, and the JSON that a run saves.

0.2 saves the fields of its TOML (`--job.save_config_file`). Later versions have no files: a run is a Python function,
and what it returns is saved by `--debug.save_config_file`, the model spelled out, the batch counted in tokens. It is
turned into the settings of 0.2 here, as far as it says the same (torchtitan/trainer.py and config/configs.py, commit
b5bcd76c66d0, August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.documents import JSON, TOML, Format, Names, Settings, flatten, without_comments
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json

SHAPE, TITLE = "model_spec.shape", "TorchTitan configuration"
# Models of TorchTitan that are no language models.
_OTHER_MODELS = {"flux": "is a model of pictures", "vlm": "reads pictures too"}
_RATE = ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor")
_SAME = ("max_norm", "steps", "enable_cpu_offload", "dtype", "mixed_precision_param")


def _parse(text: str, what: str, names: Names) -> Settings:
    if not text.lstrip().startswith("{"):
        settings = TOML.parse(text, what, names)
    else:
        settings = JSON.parse(text, what, names)
        if any(key.startswith("model_spec.") for key in settings):
            settings = _settings_of_run(_nested(text), names)
        settings = {key: value for key, value in settings.items() if value is not None}
    name = settings.get("model.name")
    if isinstance(name, str) and name in _OTHER_MODELS:
        raise SpecError("model.name", f"{name} {_OTHER_MODELS[name]}", "only language models are read")
    return settings


def _nested(text: str) -> dict[str, Any]:
    tree: dict[str, Any] = parse_json(without_comments(text))
    return tree


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


def _expert_width(experts: Any) -> int:
    width: int = experts["routed_experts"]["inner_experts"]["hidden_dim"]
    return width


def _experts(experts: Mapping[str, Any], layers: list[Any]) -> dict[str, Any]:
    kinds = [bool(layer.get("moe")) for layer in layers]
    dense = kinds.index(True)
    if not all(kinds[dense:]):
        raise TypeError("experts in some layers only")
    router, shared = experts["router"], experts.get("shared_experts")
    return {
        "experts": experts["num_experts"], "top_k": router["top_k"], "ffn": _expert_width(experts),
        "shared_ffn": shared["w1"]["out_features"] if shared else 0, "shared_gate": bool(shared and "gate" in shared),
        "dense_layers": dense, "router": router["score_func"], "router_bias": bool(router["gate"].get("bias")),
        "groups": router.get("num_expert_groups") or 1, "groups_used": router.get("num_limited_groups") or 1,
    }  # fmt: skip


FILES = Format((*TOML.suffixes, *JSON.suffixes), _parse, TOML.render)
