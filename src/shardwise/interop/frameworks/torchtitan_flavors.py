"""The models that TorchTitan ships, by name and flavor: presets here, or shapes that are small and only its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.spec import presets
from shardwise.spec.model import Model

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
        "mlp_bias": True, "sliding_window": 128, "sliding_window_every": 2,
        "moe": {"experts": 8, "top_k": 4, "ffn": 2880, "router_bias": True}, "numerics": {"rope_theta": 150_000},
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
