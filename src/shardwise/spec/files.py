"""Documents in and out: where text becomes data (YAML, JSON, TOML), with every failure as one clear line.

What is read may be damaged, or made to exhaust whoever reads it: a few kilobytes of aliases stand for billions of
values, a number of a million digits takes minutes to print. So a document has limits, which no honest one reaches.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml

from shardwise.spec.errors import SpecError, shown

MOST_CHARACTERS = 16 * 2**20  # JSON takes up to 30 times as many bytes of memory
MOST_IN_CONFIGURATION = 4 * 2**20  # characters of a file that may be the configuration of a framework
MOST_VALUES = 100_000
IN_BULK = 20_000_000  # values of what programs write: an entry for every tensor, block or range of a trace
DEEPEST = 100  # the loaders, and much that walks over what they made, call themselves once for every level
_MOST_DIGITS = 300  # a float has at most 309
_LARGEST = 10**_MOST_DIGITS
_MOST_PARTS = 50  # of a TOML key
_OURS = "is it the right file?"
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def bounded_text(path: Path, most: int, errors: str = "strict") -> str | None:
    """The text of a file; None if it has more than ``most`` characters: a device may never end."""
    with path.open(encoding="utf-8", errors=errors) as file:
        text = file.read(most + 1)
    return text if len(text) <= most else None


def read_text(path: Path | str, what: str, most: int = MOST_CHARACTERS, errors: str = "strict") -> str:
    """The text of a file; ``what`` it should be is named in the error."""
    path = Path(path)
    named = shown(str(path), 300)
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for an invalid path)
        raise SpecError(what, f"{named} is a folder", "name the file inside it")
    try:
        text = bounded_text(path, most, errors)
    except FileNotFoundError:
        raise SpecError(what, f"{named} is not there", "check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise SpecError(what, f"{named} cannot be read ({reason})", "check the file") from None
    if text is None:
        raise SpecError(what, f"{named} is larger than {most >> 20} MiB", f"is it a {what}?")
    return text


def bounded_lines(file: BinaryIO, most: int) -> Iterator[bytes | None]:
    """The lines of a file; None for one of more than ``most`` bytes, which is passed over in pieces."""
    while line := file.readline(most + 1):
        if len(line) <= most:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(2**20)
        yield None


# -- JSON and TOML ---------------------------------------------------------------------------------------------------


def parse_json(
    text: str | bytes,
    what: str = "text",
    *,
    most_values: int = MOST_VALUES,
    unique: bool = False,
    finite: bool = False,
    halves: bool = False,
) -> Any:
    """The document in ``text``; ``unique`` refuses a key given twice, ``finite`` the words NaN and Infinity.

    Halves of characters are refused, but where ``halves`` says that the caller replaces them.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _unique} if unique else {}
    if finite:
        hooks["parse_constant"] = _not_json

    def load() -> Any:
        decoded = text.decode() if isinstance(text, bytes) else text
        data = json.loads(decoded, **hooks)
        if not halves and _HALF_CHARACTER.search(decoded):
            require_whole_characters(data)
        return data

    return _bounded(load, what, "JSON", most_values)


def read_json(path: Path | str, what: str, most: int = MOST_CHARACTERS, most_values: int = MOST_VALUES) -> Any:
    return parse_json(read_text(path, what, most), f"{what} {path}", most_values=most_values)


def parse_toml(text: str, what: str = "text") -> Any:
    """The document in ``text``; a key has few parts, of which tomllib takes the square in time."""

    import tomllib  # few need it

    def load() -> Any:
        if any(line.partition("=")[0].count(".") > _MOST_PARTS for line in text.splitlines()):
            raise ValueError(f"a key of more than {_MOST_PARTS} parts")
        return tomllib.loads(text)

    return _bounded(load, what, "TOML", MOST_VALUES)


def require_whole_characters(data: Any) -> None:
    """Raises ValueError where text has half of a character, which JSON can say and no file or terminal can hold."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half a character") from None


def _bounded(load: Callable[[], Any], what: str, language: str, most_values: int) -> Any:
    try:
        data = load()
    except UnicodeDecodeError:
        raise SpecError(what, "is not text in UTF-8", "correct it") from None
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's own, of the digits of a whole number
            raise _too_long(what) from None
        raise SpecError(what, f"malformed {language}: {str(error)[:120]}", "correct it") from None
    _check(data, what, most_values)
    return data


def _check(data: Any, what: str, most_values: int) -> None:
    """Refuses what is too much, too deep or too large to compute with."""
    level, values = [data], 0
    for _ in range(DEEPEST + 1):
        values += len(level)
        if values > most_values:
            raise SpecError(what, f"holds more than {most_values:,} values", _OURS)
        if any(type(value) is int and not -_LARGEST < value < _LARGEST for value in level):
            raise _too_long(what)
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise _too_deep(what)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(what: str) -> SpecError:
    return SpecError(what, f"is nested more than {DEEPEST} levels deep", _OURS)


def _too_long(what: str) -> SpecError:
    return SpecError(what, f"holds a number of more than {_MOST_DIGITS} digits", "write a smaller one")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {shown(key)} twice")
        result[key] = value
    return result


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


# -- YAML ------------------------------------------------------------------------------------------------------------

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
                raise yaml.constructor.ConstructorError(None, None, f"key {shown(key)} twice, line {line}", None)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        try:
            # 1:59:59 counts in sixties, and takes the square of its parts in time.
            long = kind in ("int", "float") and len(node.value) > _MOST_DIGITS
            made = None if long else super().construct_object(node, deep)
        except (ValueError, TypeError, OverflowError):
            problem = f"{shown(node.value)} is not a {_KINDS.get(kind, kind)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if long or (type(made) is int and not -_LARGEST < made < _LARGEST):
            problem = f"{shown(node.value)} has more than {_MOST_DIGITS} digits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return made


def read_yaml(path: Path | str, what: str = "file") -> Any:
    """The document in ``path`` as plain data."""
    return parse_yaml(read_text(path, what), what=f"{what} {path}")


def parse_yaml(text: str, what: str = "text") -> Any:
    """The document in ``text`` as plain data."""
    try:
        _check_events(text, what)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_aliases(node, what)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(what, f"malformed YAML: {problem} {where}", "correct that line") from None


def _check_events(text: str, what: str) -> None:
    """Refuses what would take long to load, or more stack than there is, before anything is made of it."""
    values = depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _too_deep(what)
        if values > 2 * MOST_VALUES:  # a key and what it says
            raise SpecError(what, f"holds more than {MOST_VALUES:,} values", _OURS)


def _check_aliases(node: Any, what: str) -> None:
    """Refuses what aliases and merged mappings (``<<``) would make too much or too deep, before they are followed."""
    values, depth = _extent(node, {})
    if values > MOST_VALUES:
        raise SpecError(what, f"aliases make it more than {MOST_VALUES:,} values", "write them out")
    if depth > DEEPEST:
        raise SpecError(what, f"aliases nest it more than {DEEPEST} levels deep", "write them out")


def _extent(node: Any, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Values and depth of a node with its aliases written out; infinite where one holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1, 0
    if id(node) not in known:
        known[id(node)] = (math.inf, math.inf)
        inside = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        inner = [_extent(child, known) for child in inside]
        known[id(node)] = (1 + sum(values for values, _ in inner), 1 + max((depth for _, depth in inner), default=0))
    return known[id(node)]


# -- YAML as text ----------------------------------------------------------------------------------------------------


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
