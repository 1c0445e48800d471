"""The rotary positions of a ``config.json``, in its older and its newer spelling, and back in the older one.

Older configs have ``rope_theta`` beside an optional ``rope_scaling``; since transformers 5 both stand in one
``rope_parameters``. Every version reads the older spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.keys import Config
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model, RopeScaling

# Field of RopeScaling -> key of the config.
_KEYS = {
    "factor": "factor",
    "original_seq": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all": "mscale_all_dim",
    "truncate": "truncate",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_KINDS = ("linear", "llama3", "yarn", "longrope")
_SEEING_ALL, _WINDOWED = "full_attention", "sliding_attention"


def read_theta(value: Any, config: Config) -> Any:
    return _parameters(config).get("rope_theta", value)


def read_share(value: Any, config: Config) -> Any:
    """The part of a head's features that turns."""
    return _parameters(config).get("partial_rotary_factor", value)


def read_windowed_theta(value: Any, config: Config) -> Any:
    """Of a family whose layers with a window turn by frequencies of their own."""
    windowed = _parameters(config, _WINDOWED)
    kind = windowed.get("rope_type", "default")
    if kind != "default":
        raise SpecError(f"rope_parameters.{_WINDOWED}.rope_type", f"{shown(kind)} is not supported", "use default")
    return windowed.get("rope_theta", value) if _are_several(config) else value


def read_global_theta(value: Any, config: Config) -> Any:
    return _parameters(config, _SEEING_ALL).get("rope_theta", value)


def read_global_scaling(value: Any, config: Config) -> RopeScaling | None:
    return _scaling(value, config, _parameters(config, _SEEING_ALL))


def read_scaling(value: Any, config: Config) -> RopeScaling | None:
    return _scaling(value, config, _parameters(config))


def _scaling(value: Any, config: Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    name = "rope_scaling" if value else "rope_parameters"
    said = value or parameters
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name, in Phi-3
    if kind == "default":
        return None
    if kind not in _KINDS:
        raise SpecError(f"{name}.rope_type", f"{shown(kind)} is not supported", f"use one of {', '.join(_KINDS)}")
    fields = {field: said[key] for field, key in _KEYS.items() if said.get(key) is not None}
    longest = config["max_position_embeddings"]
    if kind == "longrope" and "original_max_position_embeddings" in config:
        fields.setdefault("original_seq", config["original_max_position_embeddings"])
    if kind != "linear":
        fields.setdefault("original_seq", longest)
    if "factor" not in fields and isinstance(fields.get("original_seq"), int):
        fields["factor"] = longest / max(1, fields["original_seq"])
    try:
        return RopeScaling.from_dict({"kind": kind, **fields})
    except SpecError as error:
        raise SpecError(f"{name}.{_KEYS.get(error.field, error.field)}", error.problem, error.remedy) from None


def write_scaling(value: RopeScaling | None, model: Model) -> dict[str, Any] | None:
    if value is None:
        return None
    said = {key: getattr(value, field) for field, key in _KEYS.items() if field in value.to_dict()}
    if value.kind == "llama3":  # these two have no default in transformers
        said |= {"low_freq_factor": value.low_frequency, "high_freq_factor": value.high_frequency}
    if value.kind == "longrope":
        said |= {"short_factor": list(value.short_factors), "long_factor": list(value.long_factors)}
    return {"rope_type": value.kind, **said}


def _parameters(config: Config, layers: str = "") -> Mapping[str, Any]:
    """Those of all layers, or of the kind ``layers`` where kinds differ."""
    parameters = config.get("rope_parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise SpecError("rope_parameters", f"{shown(parameters)} is not a mapping", "correct that value of the config")
    if not _are_several(config):
        return parameters
    if not layers:
        raise SpecError("rope_parameters", "differ between kinds of layers", "only one for all layers is read")
    inner = parameters.get(layers)
    return inner if isinstance(inner, Mapping) else {}


def _are_several(config: Config) -> bool:
    parameters = config.get("rope_parameters")
    return isinstance(parameters, Mapping) and any(isinstance(inner, Mapping) for inner in parameters.values())
