"""How each `Model` field is written in a ``config.json``: keys, rotary positions, and values spelled differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.interop.tensor_names import TensorNames
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.layers import LayerRecord, Mixer
from shardwise.spec.model import Model
from shardwise.spec.numerics import RopeScaling

Config = Mapping[str, Any]

NUMBER = (int, float)  # a bool is an int to Python; `Model` itself tells the two apart
TEXT = (str,)
LIST = (list, tuple)
MAPPING = (dict,)
_NOUNS: dict[tuple[type, ...], str] = {NUMBER: "a number", TEXT: "text", LIST: "a list", MAPPING: "a mapping"}


class NotDescribed(SpecError):
    """What a config says cannot be expressed as a `Model`, or is of a family that has no table."""


@dataclass(frozen=True)
class Key:
    """One key of a config: its name (and older names), the library's default, and the types of its value.

    ``read`` turns the config's value (and the whole config, defaults filled in) into the field's value;
    ``write`` goes back, from the field's value and the whole model.
    """

    names: tuple[str, ...]
    default: Any
    types: tuple[type, ...] = NUMBER
    nullable: bool = False
    read: Callable[[Any, Config], Any] = lambda value, config: value
    write: Callable[[Any, Model], Any] = lambda value, model: value

    @property
    def name(self) -> str:
        return self.names[0]

    def value_in(self, config: Config) -> Any:
        """What ``config`` says under any of the names, or the default; raises SpecError for a wrong type."""
        given = [name for name in self.names if name in config]
        name = next((name for name in given if config[name] is not None), given[0] if given else self.name)
        value = config.get(name, self.default)
        if isinstance(value, self.types) or (value is None and self.nullable):
            return value
        raise SpecError(name, f"{shown(value)} is not {_NOUNS[self.types]}", "correct that value of the config")


@dataclass(frozen=True)
class Family:
    """A ``model_type``: its fixed fields, its keys, and the settings a `Model` cannot express.

    ``keys`` are by dotted field of `Model`. ``requires`` gives, for a key, the one value that is understood
    (or a function from the config to it). ``also`` gives the keys to write that no field alone decides. ``tensors`` is
    None where only the shape is read, no weights. ``layers`` changes the layers that the fields make, where the config
    lists them or they follow from several keys.
    """

    model_type: str
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    also: Callable[[Model], dict[str, Any]] = lambda model: {}
    tensors: TensorNames | None = None
    layers: Callable[[Config, Sequence[LayerRecord]], Sequence[LayerRecord]] = lambda config, layers: layers


def key(names: str, default: Any, **options: Any) -> Key:
    """A `Key` with its names separated by ``|``; nullable when null is its default."""
    return Key(tuple(names.split("|")), default, **{"nullable": default is None, **options})


def unflatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path as a tree: ``{"moe.top_k": 2}`` becomes ``{"moe": {"top_k": 2}}``."""
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *parents, last = path.split(".")
        branch = tree
        for name in parents:
            branch = branch.setdefault(name, {})
        branch[last] = value
    return tree


def with_defaults(keys: Mapping[str, Key], **defaults: Any) -> dict[str, Key]:
    """The same keys, some with another default of the library."""
    return {name: replace(key, default=defaults.get(name, key.default)) for name, key in keys.items()}


GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu", "gelu_new": "geglu"}
PLAIN = {"gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
SQUARED = {**PLAIN, "relu2": "relu2"}


def activation(names: str, default: str, meanings: Mapping[str, str]) -> dict[str, Key]:
    """The activation function (gated ones have names of their own in `Model`), and which of the two GELUs it is."""

    def read(value: Any, config: Config) -> str:
        if value in meanings:
            return meanings[value]
        raise NotDescribed(names.split("|")[0], f"{shown(value)} is not known", "use one of " + ", ".join(meanings))

    def write(_: Any, model: Model) -> str:
        gelu = model.activation in ("gelu", "geglu")
        same = [name for name, meaning in meanings.items()
                if meaning == model.activation and (not gelu or _gelu(name) == model.numerics.gelu)]  # fmt: skip
        return default if default in same or not same else same[0]

    return {
        "activation": key(names, default, types=TEXT, read=read, write=write),
        "numerics.gelu": key(names, default, types=TEXT, read=lambda value, config: _gelu(value), write=write),
    }


def _gelu(name: str) -> str:
    return "exact" if name == "gelu" else "tanh"


# -- Rotary positions: older configs have ``rope_theta`` beside an optional ``rope_scaling``; since transformers 5 both
# are in one ``rope_parameters``. Every version reads the older form, which is the one written.

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
GLOBAL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def rotary(name: str, layers: str = "") -> Callable[[Any, Config], Any]:
    """A reader of one of the rotary parameters, of all layers or of the kind ``layers``."""
    return lambda value, config: _parameters(config, layers).get(name, value)


def read_windowed_theta(value: Any, config: Config) -> Any:
    """Of a family whose windowed layers have rotary frequencies of their own."""
    windowed = _parameters(config, WINDOWED)
    kind = windowed.get("rope_type", "default")
    if kind != "default":
        raise SpecError(f"rope_parameters.{WINDOWED}.rope_type", f"{shown(kind)} is not supported", "use default")
    return windowed.get("rope_theta", value) if _differ_by_layer(config) else value


def rope_scaling(layers: str = "", usual: Mapping[str, Any] | None = None) -> Key:
    """The stretching of rotary positions, of all layers or of a kind of them; ``usual`` where a config has none."""

    def read(value: Any, config: Config) -> RopeScaling | None:
        gives_way = value == usual and config.get("rope_parameters")
        return _scaling(None if gives_way else value, config, _parameters(config, layers))

    def write(value: RopeScaling | None, model: Model) -> dict[str, Any] | None:
        absent = {"rope_type": "default"} if usual else None  # null would be the usual one
        return write_scaling(value, model) or absent

    return key("rope_scaling", usual, types=MAPPING, nullable=True, read=read, write=write)


def _scaling(value: Any, config: Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    name = "rope_scaling" if value else "rope_parameters"
    given = value or parameters
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name, in Phi-3
    if kind in ("default", "mrope"):  # the second differs only between the tokens of a picture
        return None
    if kind not in _KINDS:
        raise SpecError(f"{name}.rope_type", f"{shown(kind)} is not supported", f"use one of {', '.join(_KINDS)}")
    fields = {field: given[key] for field, key in _KEYS.items() if given.get(key) is not None}
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
    written = {key: getattr(value, field) for field, key in _KEYS.items() if field in value.to_dict()}
    if value.kind == "llama3":  # these two have no default in transformers
        written |= {"low_freq_factor": value.low_frequency, "high_freq_factor": value.high_frequency}
    if value.kind == "longrope":
        written |= {"short_factor": list(value.short_factors), "long_factor": list(value.long_factors)}
    return {"rope_type": value.kind, **written}


def _parameters(config: Config, layers: str = "") -> Mapping[str, Any]:
    """The rotary parameters of all layers, or of the kind ``layers`` where kinds differ."""
    parameters = config.get("rope_parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise SpecError("rope_parameters", f"{shown(parameters)} is not a mapping", "correct that value of the config")
    if not _differ_by_layer(config):
        return parameters
    if not layers:
        raise SpecError("rope_parameters", "differ between kinds of layers", "only one set for all layers is supported")
    inner = parameters.get(layers)
    return inner if isinstance(inner, Mapping) else {}


def _differ_by_layer(config: Config) -> bool:
    parameters = config.get("rope_parameters")
    return isinstance(parameters, Mapping) and any(isinstance(inner, Mapping) for inner in parameters.values())


# -- Layers that a config lists one by one

_MIXERS: dict[str, Mixer] = {GLOBAL: "full", WINDOWED: "window", "chunked_attention": "chunk"}
WITH_DELTA_NETS: dict[str, Mixer] = {GLOBAL: "full", LINEAR: "delta"}


def listed_layers(
    config: Config,
    layers: Sequence[LayerRecord],
    usual: Callable[[int], str] = lambda index: GLOBAL,
    mixers: Mapping[str, Mixer] = _MIXERS,
) -> list[LayerRecord]:
    """The layers with the mixers of ``layer_types``, or with ``usual`` ones where that is absent."""
    kinds = config.get("layer_types")
    kinds = [usual(index) for index in range(len(layers))] if kinds is None else kinds
    if not isinstance(kinds, LIST) or len(kinds) != len(layers):
        raise SpecError("layer_types", f"{shown(kinds)} does not list {len(layers)} layers", "give one for each layer")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in mixers:
            raise SpecError("layer_types", f"{shown(kind)} is not supported", f"use one of {', '.join(mixers)}")
    return [replace(layer, mixer=mixers[kind]) for kind, layer in zip(kinds, layers)]


def listed_layers_or_usual(config: Config, layers: Sequence[LayerRecord]) -> Sequence[LayerRecord]:
    """The layers with the mixers of ``layer_types``; without a list as the fields make them."""
    return layers if config.get("layer_types") is None else listed_layers(config, layers)


def usual_every(every: Any, others: str = WINDOWED) -> Callable[[int], str]:
    """Every n-th layer attends to all keys, the others have a window, or what ``others`` says."""

    def kind(index: int) -> str:
        if type(every) is not int or every < 1:
            problem = f"{shown(every)} is not a positive number"
            field = "sliding_window_pattern" if others == WINDOWED else "full_attention_interval"
            raise SpecError(field, problem, "correct it, or list the layers in layer_types")
        return GLOBAL if (index + 1) % every == 0 else others

    return kind


def layer_types(model: Model) -> dict[str, Any]:
    """The list that says which mixers a model's layers have."""
    names = {mixer: name for name, mixer in (_MIXERS | WITH_DELTA_NETS).items()}
    return {"layer_types": [names[layer.mixer] for layer in model.every_layer[: model.layers]]}


# -- Readers and writers of fields that a config and a `Model` express differently -------------------


def four_times(name: str) -> Callable[[Any, Config], Any]:
    """An MLP width that defaults to four times the hidden size, which is under ``name``."""
    return lambda value, config: 4 * config[name] if value is None else value


def integer(value: Any, model: Model) -> Any:
    """As an int where it is one: some keys accept nothing else."""
    return value if value is None or value != int(value) else int(value)
