"""YAML documents in and out, with every failure as one clear line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from shardwise.spec.errors import SpecError, shown

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_BYTES = 16 * 2**20
_MAX_VALUES = 10**6


class _Loader(_BaseLoader):  # type: ignore[misc]
    """A safe loader that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node.value, str) else None
            if key in seen and key != "<<":
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice, line {line}", None)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path | str, what: str = "file") -> Any:
    """The document in ``path`` as plain data."""
    path = Path(path)
    try:
        if path.is_dir():
            raise SpecError(what, f"{shown(str(path), 300)} is a folder", "name the file inside it")
        if path.stat().st_size > _MAX_BYTES:
            raise SpecError(
                what, f"{shown(str(path), 300)} is larger than {_MAX_BYTES >> 20} MiB", "is it a YAML file?"
            )
        text = path.read_text(encoding="utf-8")
    except SpecError:
        raise
    except FileNotFoundError:
        raise SpecError(what, f"{shown(str(path), 300)} is not there", "check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise SpecError(what, f"{shown(str(path), 300)} cannot be read ({reason})", "check the file") from None
    return parse_yaml(text, what=f"{what} {path}")


def parse_yaml(text: str, what: str = "text") -> Any:
    """The document in ``text`` as plain data."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(what, f"malformed YAML: {problem} {where}", "correct that line") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise SpecError(what, f"malformed YAML: {shown(str(error))}", "correct the file") from None
    if _values_in(data, {}) > _MAX_VALUES:
        raise SpecError(what, f"aliases make it more than {_MAX_VALUES:,} values", "write them out")
    return data


def _values_in(data: Any, counted: dict[int, float]) -> float:
    """Values of a document with its aliases written out; infinite where one holds itself."""
    if not isinstance(data, (dict, list)):
        return 1
    if id(data) not in counted:
        counted[id(data)] = math.inf
        inner = data.values() if isinstance(data, dict) else data
        counted[id(data)] = 1 + sum(_values_in(item, counted) for item in inner)
    return counted[id(data)]


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values on one line and the keys in their own order."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, (dict, list)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _represent_list)


def dump_yaml(data: Any) -> str:
    """``data`` as YAML text that reads back to equal data."""
    readable = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    if parse_yaml(readable) == data:
        return readable
    # Unicode's own line breaks do not survive as they are: write them escaped.
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)
