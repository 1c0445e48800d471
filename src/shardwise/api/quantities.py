"""What callers give: whole numbers, amounts with a unit, texts, paths, files to write; and words that were renamed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import parse


def whole_number(value: Any, field: str, most: int = 10**9) -> int:
    number = parse(value, "count", field)
    if number != int(number) or not 1 <= number <= most:
        raise SpecError(field, f"{shown(value)} is not a positive whole number", "write one like 64")
    return int(number)


def exclusive(field: str, value: Any, other: str) -> SpecError:
    """The error for two mutually exclusive settings."""
    return SpecError(field, f"{shown(value)} and {other} are mutually exclusive", "give one of them")


def amount(value: Any, dimension: str, field: str, example: str, *, zero: bool = False) -> float:
    """A positive number of bytes, seconds, ...; ``zero`` allows 0 too."""
    remedy = f"write it like {example}"
    try:
        number = float(parse(value, dimension, field))
    except SpecError as error:
        raise SpecError(field, error.problem, remedy) from None
    if number < 0 or (number == 0 and not zero):
        raise SpecError(field, f"{shown(value)} is not {'0 or more' if zero else 'positive'}", remedy)
    return number


def path_text(value: Any, field: str) -> str:
    """The path or URI that a caller names; it need not exist."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    try:
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return text
    except UnicodeError:
        pass
    raise SpecError(field, f"{shown(value)} is not a path", "give text or a Path")


def texts(value: Any, field: str) -> tuple[str, ...]:
    """One text, or a list of them."""
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(text, str) for text in listed):
        raise SpecError(field, f"{shown(value)} is not text, nor a list of texts", "write each as text")
    return tuple(listed)


def require_writable(path: Path, field: str) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise SpecError(field, f"{path} cannot be written", "give another name")


def write_text(path: str | Path, text: str, field: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise not_written(path, error, field) from None


def not_written(path: str | Path, error: Exception, field: str) -> SpecError:
    reason = getattr(error, "strerror", None) or "not a path"
    return SpecError(field, f"{shown(str(path), 300)} cannot be written ({reason})", "give another name")


# -- words that flags and keywords had before: they work until 1.0, with a hint ----------------------


# By verb ("" is every verb, "explain scaling" one topic): the old word of a flag, and the word that it has now.
OLD_WORDS: Mapping[str, Mapping[str, str]] = {
    "": {"batch": "global-batch"},
    "plan": {"output": "out"},
    "report": {"output": "out"},
    "bench": {"warm-up": "warmup", "plot": "picture", "seconds": "time-limit"},
    "data": {"workers": "processes"},
    "doctor": {"folder": "run-folder"},
    "explain": {"n": "gpus"},
    "explain scaling": {"n": "factor"},
    "generate": {
        "batch": "batch-size",
        "data": "prompt-file",
        "device": "run-device",
        "tokens": "prompt-tokens",
        "workers": "replicas",
    },
}


def renamed(verb: str) -> dict[str, str]:
    """The words of a verb that changed, as old → new."""
    first, _, _ = verb.partition(" ")
    return {**OLD_WORDS[""], **OLD_WORDS.get(first, {}), **OLD_WORDS.get(verb, {})}


def keywords_now(verb: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call in the words of today; an old one gives a DeprecationWarning."""
    words = {old.replace("-", "_"): new.replace("-", "_") for old, new in renamed(verb).items()}
    for old in words.keys() & keywords.keys():
        if words[old] in keywords:
            raise SpecError(old, f"is now {words[old]}, and both are given", "leave it out")
        warnings.warn(f"{old}= is now {words[old]}=", DeprecationWarning, stacklevel=3)
    return {words.get(name, name): value for name, value in keywords.items()}
