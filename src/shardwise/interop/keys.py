"""How one `Model` field is written in a ``config.json``, and what makes a family of such configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model

Config = Mapping[str, Any]

NUMBER = (int, float)  # a bool is an int to Python; `Model` itself tells the two apart
TEXT = (str,)
LIST = (list, tuple)
MAPPING = (dict,)
_NOUNS: dict[tuple[type, ...], str] = {NUMBER: "a number", TEXT: "text", LIST: "a list", MAPPING: "a mapping"}


@dataclass(frozen=True)
class Key:
    """One key of a config: its name (and older names), the library's default, and what it may hold.

    ``read`` turns the config's value (and the whole config, defaults filled in) into the field's value;
    ``write`` goes back, from the field's value and the whole model.
    """

    names: tuple[str, ...]
    default: Any
    holds: tuple[type, ...] = NUMBER
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
        if isinstance(value, self.holds) or (value is None and self.nullable):
            return value
        raise SpecError(name, f"{shown(value)} is not {_NOUNS[self.holds]}", "correct that value of the config")


@dataclass(frozen=True)
class Family:
    """A ``model_type``: its fixed fields, its keys, and the settings a `Model` cannot express.

    ``keys`` are by dotted field of `Model`. ``requires`` gives, for a key, the one value that is understood
    (or a function from the config to it). ``also`` gives the keys to write that no field alone decides.
    """

    model_type: str
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    also: Callable[[Model], dict[str, Any]] = lambda model: {}


def key(names: str, default: Any, **options: Any) -> Key:
    """A `Key` with its names separated by ``|``; nullable when null is its default."""
    return Key(tuple(names.split("|")), default, **{"nullable": default is None, **options})


def with_defaults(keys: Mapping[str, Key], **defaults: Any) -> dict[str, Key]:
    """The same keys, some with another default of the library."""
    return {name: dataclasses.replace(one, default=defaults.get(name, one.default)) for name, one in keys.items()}


GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu": "geglu",
    "gelu_new": "geglu",
}
PLAIN = {"gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}


def activation(names: str, default: str, meanings: Mapping[str, str]) -> dict[str, Key]:
    """The activation function, and which of the two GELUs it is.

    A gated one multiplies a second projection, which `Model` names apart.
    """

    def read(value: Any, config: Config) -> str:
        if value in meanings:
            return meanings[value]
        raise SpecError(names.split("|")[0], f"{shown(value)} is not known", "use one of " + ", ".join(meanings))

    def write(_: Any, model: Model) -> str:
        gelu = model.activation in ("gelu", "geglu")
        same = [name for name, meaning in meanings.items()
                if meaning == model.activation and (not gelu or _gelu(name) == model.numerics.gelu)]  # fmt: skip
        return default if default in same or not same else same[0]

    def read_gelu(value: Any, config: Config) -> str:
        return _gelu(value)

    return {
        "activation": key(names, default, holds=TEXT, read=read, write=write),
        "numerics.gelu": key(names, default, holds=TEXT, read=read_gelu, write=write),
    }


def _gelu(name: str) -> str:
    return "exact" if name == "gelu" else "tanh"
