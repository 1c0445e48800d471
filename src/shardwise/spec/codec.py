"""How the nouns of `spec` are checked, read from plain data and written back.

Every noun is a frozen dataclass derived from `Spec`. Its fields are converted when it is made: text with units becomes
a number, a list a tuple, a mapping a nested noun. So the same code checks a value from Python, from YAML and from a
flag, and a mistake is the same line in each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, TypedDict, TypeVar, Union, Unpack, get_args, get_origin

from shardwise.spec import units
from shardwise.spec.errors import SpecError, join_path, nearest_name, shown

T = TypeVar("T")


class Shown(TypedDict, total=False):
    """What callers may write for a field, and how they name it beside its path; for `spec.fields`."""

    flag: str
    """Flag that sets it. That of a bool takes no value and sets the opposite of the default."""
    help: str
    """Help of the flag where the line below the field does not suit."""
    choices: Callable[[], Iterable[str]]
    """The values to choose from, where the type does not list them."""
    words: tuple[str, ...]
    """Words that a job file may have in place of a value, such as `auto`."""
    means: Mapping[str, Any]
    """The values that some of these words are other names for."""
    also: tuple[type[Any], ...]
    """Other nouns whose fields may stand in its place."""


def setting(default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field whose ``metadata`` says how it is converted and checked, and how callers name it (`Shown`)."""
    return dataclasses.field(default=default, metadata=metadata)


def quantity(
    dimension: str, default: Any = dataclasses.MISSING, *, minimum: float | None = None, **names: Unpack[Shown]
) -> Any:
    """A field that takes a number or text with a unit; positive unless ``minimum`` says otherwise."""
    above = 0 if minimum is None else None
    return setting(default, dimension=dimension, minimum=minimum, above=above, **names)


def count(
    default: Any = dataclasses.MISSING, *, minimum: int = 1, maximum: int | None = None, **names: Unpack[Shown]
) -> Any:
    """A field that takes a whole number of at least ``minimum`` and at most ``maximum``."""
    return setting(default, minimum=minimum, maximum=maximum, **names)


def reference(
    resolve: Callable[[Any], Any],
    shorten: Callable[[Any], Any],
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    **names: Unpack[Shown],
) -> Any:
    """A field that also takes a name or a file: ``resolve`` finds the noun, ``shorten`` names it again."""
    metadata = {"resolve": resolve, "shorten": shorten, **names}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)


class Spec:
    """Base of every noun: conversion and checks on construction, plain data in and out."""

    def __post_init__(self) -> None:
        for field, hint in hinted_fields(type(self)):
            value = _convert(getattr(self, field.name), hint, field.metadata, field.name)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Checks that involve several fields; raises SpecError."""

    def unchecked(self, **changes: Any) -> Self:
        """A copy with some fields changed, without conversion and checks: for values that are known to be right.

        A search makes thousands of strategies from values it has checked one by one.
        """
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        return copy

    @classmethod
    def from_dict(cls, data: object, path: str = "") -> Self:
        """The noun that ``data`` describes; ``path`` is its place in the document, for error messages."""
        if not isinstance(data, Mapping):
            raise SpecError(path, f"{shown(data)} should be a mapping of fields", f"see the fields of {cls.__name__}")
        known = {field.name: field for field, _ in hinted_fields(cls)}
        for key in data:
            if key not in known:
                raise SpecError(join_path(path, shown(key).strip("'")), "unknown field", nearest_name(str(key), known))
        for name, field in known.items():
            if name not in data and is_required(field):
                raise SpecError(join_path(path, name), "is missing", f"{cls.__name__} needs it")
        try:
            return cls(**data)
        except SpecError as error:
            raise error.under(path) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal noun; defaults are left out."""
        result: dict[str, Any] = {}
        for field, _ in hinted_fields(type(self)):
            value = getattr(self, field.name)
            if not is_required(field) and value == default_of(field):
                continue
            shorten = field.metadata.get("shorten")
            result[field.name] = shorten(value) if shorten else _plain(value, field.metadata)
        return result


def hinted_fields(cls: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """The fields of a noun with their types."""
    noun: Any = cls  # a class is hashable, which its type does not say
    return _cached_fields(noun)


@functools.cache
def _cached_fields(cls: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def _plain(value: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item, metadata) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item, metadata) for key, item in value.items()}
    if "dimension" in metadata and isinstance(value, (int, float)):
        return units.render(value, metadata["dimension"])
    return value


def _convert(value: Any, hint: Any, metadata: Mapping[str, Any], path: str) -> Any:
    """``value`` as the type ``hint`` asks for; raises SpecError with ``path`` where it cannot be."""
    if "resolve" in metadata and not isinstance(value, Spec) and not (value is None and type(None) in get_args(hint)):
        try:
            return metadata["resolve"](value)
        except SpecError as error:
            raise error.under(path) from None
    if "means" in metadata and isinstance(value, str):
        value = metadata["means"].get(value.lower(), value)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), metadata, path)
    if origin is Literal:
        return _convert_choice(value, get_args(hint), path)
    if origin is tuple:
        return _convert_tuple(value, get_args(hint), metadata, path)
    if origin in (dict, Mapping):
        return _convert_mapping(value, get_args(hint)[1], metadata, path)
    if isinstance(hint, type) and issubclass(hint, Spec):
        return value if isinstance(value, hint) else hint.from_dict(value, path)
    return _convert_scalar(value, hint, metadata, path)


def _convert_union(value: Any, options: tuple[Any, ...], metadata: Mapping[str, Any], path: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    # A union of a noun and something simpler: the shape of the value says which is meant.
    for option in options[:-1]:
        try:
            return _convert(value, option, metadata, path)
        except SpecError:
            continue
    return _convert(value, options[-1], metadata, path)


def _convert_choice(value: Any, choices: tuple[Any, ...], path: str) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    names = [str(choice) for choice in choices]
    text = value if isinstance(value, str) else shown(value)
    if text in names and not isinstance(value, bool):
        return choices[names.index(text)]
    raise SpecError(path, f"{shown(value)} is not a choice", "choose one of " + ", ".join(names))


def _convert_tuple(value: Any, item_hints: tuple[Any, ...], metadata: Mapping[str, Any], path: str) -> Any:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise SpecError(path, f"{shown(value)} should be a list", "write it like [a, b]")
    return tuple(_convert(item, item_hints[0], metadata, f"{path}[{i}]") for i, item in enumerate(value))


def _convert_mapping(value: Any, item_hint: Any, metadata: Mapping[str, Any], path: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(path, f"{shown(value)} should be a mapping", "write it like {name: value}")
    keys = metadata.get("keys")
    result = {}
    for key, item in value.items():
        if keys and key not in keys:
            raise SpecError(join_path(path, str(key)), "unknown name", "choose one of " + ", ".join(keys))
        result[str(key)] = _convert(item, item_hint, metadata, join_path(path, str(key)))
    return FrozenMapping(result)


def _convert_scalar(value: Any, hint: Any, metadata: Mapping[str, Any], path: str) -> Any:
    if "dimension" in metadata:
        value = units.parse(value, metadata["dimension"], path)
    elif hint is bool:
        if not isinstance(value, bool):
            raise SpecError(path, f"{shown(value)} is neither true nor false", "write true or false")
        return value
    elif hint is str:
        if not isinstance(value, str):
            raise SpecError(path, f"{shown(value)} should be text", "put it in quotes")
        return value
    elif hint is int:
        value = _whole_number(value, path)
    elif hint is float:
        value = float(units.parse(value, "share", path))
    _check_range(value, metadata, path)
    return value


def _whole_number(value: Any, path: str) -> int:
    if isinstance(value, str):
        value = units.parse(value, "count", path)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if not number or value != int(value):
        raise SpecError(path, f"{shown(value)} is not a whole number", "write a whole number")
    if abs(value) > 10**18:
        raise SpecError(path, f"{shown(value)} is out of range", "use a number below 1e18")
    return int(value)


def _check_range(value: Any, metadata: Mapping[str, Any], path: str) -> None:
    minimum, above = metadata.get("minimum"), metadata.get("above")
    if above is not None and not value > above:
        raise SpecError(path, f"{shown(value)} is not positive", f"use a value above {above}")
    if minimum is not None and value < minimum:
        raise SpecError(path, f"{shown(value)} is below {minimum}", f"use {minimum} or more")
    maximum = metadata.get("maximum")
    if maximum is not None and value > maximum:
        raise SpecError(path, f"{shown(value)} is above {maximum}", f"use {maximum} or less")


class FrozenMapping(dict[str, Any]):
    """A mapping field of a noun: as immutable and hashable as the noun itself."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def __reduce__(self) -> tuple[type[FrozenMapping], tuple[dict[str, Any]]]:
        """Pickled as a whole: item by item it would refuse to be filled."""
        return FrozenMapping, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a spec is immutable: use dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse
