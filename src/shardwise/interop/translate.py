"""Readers and writers for fields that a config and a `Model` express differently.

A reader takes the config's value and the whole config, with the library's defaults filled in; a writer takes
the field's value and the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.interop.keys import Config
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model


def four_times(name: str) -> Callable[[Any, Config], Any]:
    """An MLP width that is four times the hidden size, which stands under ``name``, unless given."""
    return lambda value, config: 4 * config[name] if value is None else value


def leading_layers(value: Any, config: Config) -> int:
    """Qwen's list of dense layers as a number of leading ones."""
    layers = list(value or ())
    if layers != list(range(len(layers))) or (layers and config["decoder_sparse_step"] != 1):
        raise SpecError("mlp_only_layers", f"{shown(value)} are not the first layers", "only leading layers are read")
    return len(layers)


def first_layers(value: Any, model: Model) -> list[int]:
    return list(range(value))


def qwen_window(value: Any, config: Config) -> Any:
    """Qwen's window holds from layer ``max_window_layers`` on, and only if switched on."""
    if not config.get("use_sliding_window", False):
        return None
    first = config.get("max_window_layers", 28)
    if first == config["num_hidden_layers"]:
        return None
    if first != 0:
        raise SpecError("max_window_layers", f"{shown(first)} leaves some layers unwindowed", "use 0, or no window")
    return value


def qwen_window_switch(model: Model) -> dict[str, Any]:
    return {"use_sliding_window": True, "max_window_layers": 0} if model.sliding_window else {}


def window_every(value: Any, config: Config) -> Any:
    """Gemma lists the kind of every layer: all n-th ones see all keys."""
    return _listed_every(value, config)


def second_window(value: Any, config: Config) -> Any:
    """Gemma 2 has no setting for its pattern; its list of layers has to show it."""
    _listed_every(2, config)
    return value


def _listed_every(every: Any, config: Config) -> Any:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and isinstance(every, int) and kinds != _layer_kinds(len(kinds), every):
        raise SpecError("layer_types", f"are not such that every {every}th layer sees all keys", "correct the config")
    return every


def _layer_kinds(layers: int, every: int) -> list[str]:
    whole = range(every - 1, layers, every) if every > 1 else range(0)
    return ["full_attention" if index in whole else "sliding_attention" for index in range(layers)]


def phi_3_lengths(model: Model) -> dict[str, Any]:
    """What Phi-3 has outside of the scaling of its positions; and no padding that lies beyond a small vocabulary."""
    scaling = model.numerics.rope_scaling
    padding = {"pad_token_id": None} if model.vocab <= 32000 else {}
    return {"original_max_position_embeddings": (scaling and scaling.original_seq) or model.max_seq, **padding}


def layer_kinds(model: Model) -> dict[str, Any]:
    return {"layer_types": _layer_kinds(model.layers, model.sliding_window_every)}


def root(value: Any, config: Config) -> Any:
    """Gemma multiplies embeddings by the root of their width."""
    return float(value) ** 0.5 if 0 < value < 1e12 else 1.0  # the width itself is refused where it is none


def whole(value: Any, model: Model) -> Any:
    """Without a fraction where there is none: some keys take no other numbers."""
    return value if value is None or value != int(value) else int(value)


def width(value: Any, model: Model) -> int:
    return model.hidden


def shared_width(value: Any, config: Config) -> Any:
    """DeepSeek counts its shared experts; `Model` takes the width of all of them together."""
    return (value or 0) * config["moe_intermediate_size"]


def shared_number(value: Any, model: Model) -> Any:
    return value // model.moe.ffn if model.moe else 0


def has_bias(value: Any, config: Config) -> bool:
    """DeepSeek-V3 balances load by a bias on the router, under this name of its method."""
    return bool(value == "noaux_tc")


def routing_method(value: Any, model: Model) -> str:
    if value:
        return "noaux_tc"
    return "group_limited_greedy" if model.moe and model.moe.groups > 1 else "greedy"


def expert_groups(value: Any, config: Config) -> Any:
    return 1 if value is None or config["topk_method"] == "greedy" else value


def falcon_norms(value: Any, config: Config) -> Any:
    if config.get("new_decoder_architecture", False):
        return 2 if value is None else value
    return 1 if config["parallel_attn"] else 2


def falcon_kv_heads(value: Any, config: Config) -> Any:
    if config.get("new_decoder_architecture", False):
        return value
    return 1 if config.get("multi_query", True) else None


def falcon_parallel(value: Any, config: Config) -> Any:
    return True if config.get("new_decoder_architecture", False) else value


def alibi_positions(value: Any, config: Config) -> str:
    return "none" if value else "rope"


def is_alibi(value: Any, model: Model) -> bool:
    return bool(value == "none")


def falcon_switches(model: Model) -> dict[str, Any]:
    grouped = model.kv_heads not in (1, model.heads) or (model.parallel_block and model.norms_per_layer == 2)
    return {"new_decoder_architecture": grouped, "multi_query": model.kv_heads == 1}
