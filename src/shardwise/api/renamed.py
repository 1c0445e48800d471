"""Words that flags and keywords had before. They work until 1.0, with a hint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.spec.errors import SpecError

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


def flags_now(verb: str, arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    """The arguments of a command in the words of today, each with the hint that it needs."""
    words = {f"--{old}": f"--{new}" for old, new in renamed(verb).items()}
    for number, argument in enumerate(arguments):
        if argument == "--":
            yield from ((rest, None) for rest in arguments[number:])
            return
        flag, equals, value = argument.partition("=")
        new = words.get(flag)
        yield (argument, None) if new is None else (f"{new}{equals}{value}", f"{flag} is now {new}")


def keywords_now(verb: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call in the words of today; an old one gives a DeprecationWarning."""
    words = {old.replace("-", "_"): new.replace("-", "_") for old, new in renamed(verb).items()}
    for old in words.keys() & keywords.keys():
        if words[old] in keywords:
            raise SpecError(old, f"is now {words[old]}, and both are given", "leave it out")
        warnings.warn(f"{old}= is now {words[old]}=", DeprecationWarning, stacklevel=3)
    return {words.get(name, name): value for name, value in keywords.items()}
