"""YAML documents in and out, with every failure as one clear line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shardwise.spec.errors import SpecError, shown

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_CHARACTERS = 16 * 2**20
_MOST_VALUES = 100_000
_DEEPEST = 100  # the loader, and much that walks over what it made, calls itself once for every level
_KINDS = {"int": "whole number", "float": "number", "timestamp": "date", "binary": "base64 string"}


class _Loader(_BaseLoader):  # type: ignore[misc]
    """A safe loader that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key should be text", key_node.start_mark)
            key = key_node.value
            if key in seen and key != "<<":
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice, line {line}", None)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, OverflowError):
            kind = node.tag.rpartition(":")[2]
            problem = f"{shown(node.value)} is not a {_KINDS.get(kind, kind)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def bounded_text(path: Path, most: int) -> str | None:
    """The text of a file; None if it has more than ``most`` characters: a device may never end."""
    with path.open(encoding="utf-8") as file:
        text = file.read(most + 1)
    return text if len(text) <= most else None


def read_yaml(path: Path | str, what: str = "file") -> Any:
    """The document in ``path`` as plain data."""
    path = Path(path)
    try:
        if path.is_dir():
            raise SpecError(what, f"{shown(str(path), 300)} is a folder", "name the file inside it")
        text = bounded_text(path, _MOST_CHARACTERS)
    except SpecError:
        raise
    except FileNotFoundError:
        raise SpecError(what, f"{shown(str(path), 300)} is not there", "check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise SpecError(what, f"{shown(str(path), 300)} cannot be read ({reason})", "check the file") from None
    if text is None:
        size = f"{_MOST_CHARACTERS >> 20} MiB"
        raise SpecError(what, f"{shown(str(path), 300)} is larger than {size}", "is it a YAML file?")
    return parse_yaml(text, what=f"{what} {path}")


def parse_yaml(text: str, what: str = "text") -> Any:
    """The document in ``text`` as plain data."""
    try:
        _check_size(text, what)
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(what, f"malformed YAML: {problem} {where}", "correct that line") from None
    values, depth = _extent(data, {})
    if values > _MOST_VALUES:
        raise SpecError(what, f"aliases make it more than {_MOST_VALUES:,} values", "write them out")
    if depth > _DEEPEST:
        raise SpecError(what, f"aliases nest it more than {_DEEPEST} levels deep", "write them out")
    return data


def _check_size(text: str, what: str) -> None:
    """Refuses what would take long to load, or more stack than there is, before anything is made of it."""
    values = depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise SpecError(what, f"is nested more than {_DEEPEST} levels deep", "is it a file of this project?")
        if values > 2 * _MOST_VALUES:  # a key and what it says
            raise SpecError(what, f"holds more than {_MOST_VALUES:,} values", "is it a file of this project?")


def _extent(data: Any, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Values and depth of a document with its aliases written out; infinite where one holds itself."""
    if not isinstance(data, (dict, list)):
        return 1, 0
    if id(data) not in known:
        known[id(data)] = (math.inf, math.inf)
        inner = [_extent(item, known) for item in (data.values() if isinstance(data, dict) else data)]
        known[id(data)] = (1 + sum(values for values, _ in inner), 1 + max((depth for _, depth in inner), default=0))
    return known[id(data)]


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values on one line and the keys in their own order."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, (dict, list)) or (isinstance(item, str) and "\n" in item) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _represent_list)


class _ManifestDumper(_Dumper):
    """Also writes a text of several lines, such as a script, as it reads; and everything where it belongs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ManifestDumper.add_representer(str, _represent_text)


def dump_yaml(data: Any) -> str:
    """``data`` as YAML text that reads back to equal data."""
    readable = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    if parse_yaml(readable) == data:
        return readable
    # Unicode's own line breaks do not survive as they are: write them escaped.
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)


def dump_documents(documents: Sequence[Any]) -> str:
    """Several documents in one text, as `kubectl` and others read them."""
    return yaml.dump_all(
        documents, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=110, explicit_start=True
    )
