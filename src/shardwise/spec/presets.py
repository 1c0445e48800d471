"""Presets by name, and a user's own file wherever a preset name may stand.

A preset is one YAML file in `catalogue/<kind>s/`, in the format a user writes. Only the file asked for is read. A file
may list ``versions``, newest first: its fields are those of the newest, and each older one changes what the newer has.
"megatron-bridge@26.04" names one, "megatron-bridge" the newest.

A file may also describe a family: its fields are those that all ``members`` share, whose names begin with the file's.
A preset with ``hub``, ids of huggingface.co, is known by these too, and the first one begins its source; likewise with
``language_model_of``, ids of models that have more than a language model.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardwise.spec.codec import Spec, reference
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import read_yaml
from shardwise.spec.hub import shape_words

_FOLDER = Path(__file__).parent / "catalogue"
_OF_THE_CATALOGUE = ("versions", "hub", "language_model_of")  # not fields of what a file describes
KINDS = ("model", "device", "link", "cluster", "stack")

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Version:
    """A release of a preset: where it is documented, and the fields in which it differs from the next newer one.

    One that stands ``apart`` is other software than newer ones: ``changed`` has all of its fields, and what is known of
    their errors says nothing of its own.
    """

    name: str
    source: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False


# Presets by the names they had before they became versions of others.
FORMER = {"deepspeed-2021": "deepspeed@2021", "megatron-2022": "megatron-core@2022"}


def names(kind: str) -> list[str]:
    """All preset names of a kind (see `KINDS`), sorted; the members of a family in the order of their file, by size."""
    return list(_files(kind))


@functools.cache
def _files(kind: str) -> Mapping[str, Path]:
    """The file of every preset."""
    paths = sorted((_FOLDER / f"{kind}s").glob("*.yaml"), key=lambda path: path.stem)
    return {name: path for path in paths for name in _members(path, kind) or (path.stem,)}


def every_name(kind: str) -> list[str]:
    """All preset names of a kind, with those of versions."""
    return [each for name in names(kind) for each in (name, *versioned(kind, name))]


def versioned(kind: str, name: str) -> list[str]:
    """The names of a preset's versions, newest first."""
    return [f"{name}@{version.name}" for version in versions(kind, name)]


def lineage(kind: str, name: str) -> str:
    """The name under which errors of a version are known: the preset's, or its own where it stands apart."""
    plain, at, wanted = name.partition("@")
    apart = at and any(version.apart for version in versions(kind, plain) if version.name == wanted)
    return name if apart else plain


def versions(kind: str, name: str) -> tuple[Version, ...]:
    """The versions of a preset, newest first; none of one that has no versions, or that is unknown."""
    path = _path(kind, name)
    if kind != "stack" or path is None:
        return ()
    return tuple(Version(**{**one, "name": str(one["name"])}) for one in _content(path, kind).get("versions", ()))


def at_release(kind: str, name: str, release: str) -> str:
    """The name of the newest version of a preset that is not newer than a release, or else the oldest.

    The preset itself, where it has no versions or the release is unknown.
    """
    known = versions(kind, name)
    if not known or not release:
        return name
    return f"{name}@{next((one.name for one in known if one.name <= release), known[-1].name)}"


def resolve(kind: str, cls: type[S], value: Any) -> S:
    """The noun that ``value`` means: itself, a mapping of its fields, a preset name, or a file."""
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return cls.from_dict(value)
    if not isinstance(value, str) or not value.strip():
        remedy = f"give a preset name, a file or a mapping of {kind} fields"
        raise SpecError("", f"{shown(value)} is not a {kind}", remedy)
    return load(kind, cls, value.strip())


def preset_field(kind: str, cls: type[Spec], **options: Any) -> Any:
    """A field that takes what `resolve` does."""
    return reference(
        functools.partial(resolve, kind, cls), shorten, choices=functools.partial(every_name, kind), **options
    )


def load(kind: str, cls: type[S], name: str) -> S:
    """A preset by name, or the user's own file of that kind."""
    known = preset_name(kind, name)
    if looks_like_file(name) and (known is None or os.path.exists(name)):  # noqa: PTH110 (raises for a long name)
        data = files_beside(read_yaml(name, "file"), Path(name).parent)
        if not isinstance(data, Mapping):
            raise SpecError(Path(name).name, "has no fields", f"it should describe a {kind}")
        if "name" not in data:
            data = {**data, "name": Path(name).stem}
        return cls.from_dict(data, path=Path(name).name)
    noun: Any = cls
    preset: S = _preset(kind, noun, known or name)
    return preset


def preset_name(kind: str, named: str) -> str | None:
    """The preset that a name means: a preset's own, its model's on huggingface.co, or that of a variant of its shape.

    None for any other, such as a size that a family has and the catalogue lacks.
    """
    plain = named.strip().lower()
    if _path(kind, plain.partition("@")[0]) is not None:
        return plain
    known = _models_by_name() if kind == "model" else {}
    return known.get(plain) or known.get(shape_words(plain))


def is_language_model(named: str, preset: str) -> bool:
    """Whether a preset is only the language model of the model that a name means."""
    whole = _fields(_files("model")[preset], "model", preset).get("language_model_of", ())
    return shape_words(named.strip()) in [shape_words(form) for one in whole for form in (one, one.partition("/")[2])]


@functools.cache
def _models_by_name() -> Mapping[str | tuple[str, ...], str]:
    """Model presets by the ids of their models, and by the words of these, with and without who publishes them."""
    ids = {name: [one.lower() for one in _ids(name)] for name in sorted(_files("model"))}
    found: dict[str | tuple[str, ...], str] = {one: name for name, known in ids.items() for one in known}
    for name, known in ids.items():
        for one in (name, *known, *(one.partition("/")[2] for one in known)):
            found.setdefault(shape_words(one), name)
    return found


# Fields that may name a file, and the kind of preset that they may name instead; None: no preset is one.
REFERENCES = {
    "model": "model",
    "cluster": "cluster",
    "device": "device",
    "link": "link",
    "host_link": "link",
    "stack": "stack",
    "wiring": None,
}


def files_beside(data: Any, folder: Path) -> Any:
    """``data`` with the files it names looked up in ``folder`` first, next to the file that names them."""
    if isinstance(data, Mapping):
        return {
            key: _beside(item, folder) if key in REFERENCES else files_beside(item, folder)
            for key, item in data.items()
        }
    if isinstance(data, list):
        return [files_beside(item, folder) for item in data]
    return data


def _beside(value: Any, folder: Path) -> Any:
    if not isinstance(value, str):
        return files_beside(value, folder)
    name, colon, size = value.rpartition(":")
    path = name if colon and size.replace("x", "").isdigit() else value
    if looks_like_file(path) and os.path.exists(folder / path):  # noqa: PTH110 (Path.exists raises for a long name)
        return str(folder / path) + value[len(path) :]
    return value


@functools.cache
def _preset(kind: str, cls: Any, name: str) -> Any:
    plain, at, version = FORMER.get(name.lower(), name).partition("@")
    path = _path(kind, plain)
    if path is None:
        remedy = nearest_name(name, names(kind)) or f"`shardwise list {kind}s` shows all"
        raise SpecError("", f"unknown {kind} {shown(name)}", remedy)
    data = {key: value for key, value in _fields(path, kind, plain.lower()).items() if key not in _OF_THE_CATALOGUE}
    return cls.from_dict(_of_version(kind, plain, version, data) if at else data, path=path.name)


def _fields(path: Path, kind: str, name: str) -> dict[str, Any]:
    """The fields of a preset, those of its family among them."""
    shared = dict(_content(path, kind))
    own = shared.pop("members", {}).get(name, {})
    inner = {key: {**shared[key], **value} for key, value in own.items() if isinstance(shared.get(key), Mapping)}
    data = {"name": name, **shared, **own, **inner}
    ids = [*data.get("hub", ()), *data.get("language_model_of", ())]
    return {**data, "source": f"{ids[0]} config.json; {data['source']}"} if ids else data


def _ids(name: str) -> list[str]:
    """The ids of a model preset on huggingface.co."""
    data = _fields(_files("model")[name], "model", name)
    return [*data.get("hub", ()), *data.get("language_model_of", ())]


def _members(path: Path, kind: str) -> tuple[str, ...]:
    """The presets of a family's file; none of a file that is one preset. Only models have families."""
    return tuple(_content(path, kind).get("members", ())) if kind == "model" else ()


def _of_version(kind: str, name: str, wanted: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a version: those of the newest, and what every older one changed, down to it."""
    known = versions(kind, name)
    if not known:
        raise SpecError("", f"{name} has no versions", f"write {name}")
    for version in known:
        data = {**({} if version.apart else data), **version.changed}
        if version.name == wanted:
            own = {"name": f"{name.lower()}@{version.name}", "source": version.source}
            return {key: value for key, value in {**data, **own}.items() if value is not None}
    nearest = at_release(kind, name.lower(), wanted)
    named = ", ".join(version.name for version in known)
    raise SpecError("", f"{name} has no version {shown(wanted)}", f"the nearest is {nearest}; known are {named}")


@functools.cache
def _content(path: Path, kind: str) -> Mapping[str, Any]:
    return dict(read_yaml(path, kind))


def _path(kind: str, name: str) -> Path | None:
    """The file of a preset, None if there is none of that name: its own, or that of its family."""
    wanted = stem = name.lower()
    while stem and _is_plain(name):
        path = _FOLDER / f"{kind}s" / f"{stem}.yaml"
        if path.is_file():
            return path if wanted in (_members(path, kind) or (stem,)) else None
        stem = stem.rpartition("-")[0]
    return None


def shorten(noun: Any) -> Any:
    """The preset name of ``noun`` where that alone brings it back, else all of its fields."""
    kind = {"Model": "model", "Device": "device", "Link": "link", "Stack": "stack"}.get(type(noun).__name__)
    own_class: Any = type(noun)
    named = kind and is_preset(kind, noun.name) and _preset(kind, own_class, noun.name) == noun
    return noun.name if named else noun.to_dict()


def is_preset(kind: str, name: str) -> bool:
    """Whether a preset of this kind, or a version of it, has this name."""
    plain, at, _ = name.partition("@")
    return name in versioned(kind, plain) if at else _path(kind, name) is not None and name == name.lower()


def looks_like_file(text: str) -> bool:
    return text.lower().endswith((".yaml", ".yml", ".json")) or "/" in text or "\\" in text


def _is_plain(name: str) -> bool:
    return 0 < len(name) < 100 and all(c.isalnum() or c in "-._" for c in name) and not name.startswith(".")
