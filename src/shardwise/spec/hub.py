"""Ids of models on huggingface.co, and the names that people type for them."""

from __future__ import annotations

import re

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # organisation/name, as the hub allows them
_FILE = re.compile(r"\.(ya?ml|json)$", re.IGNORECASE)
_NAME = re.compile(r"[\w.:/-]+")
# What follows a model's name where only its training differs.
_TRAINED = {"base", "pt", "it", "instruct", "chat", "thinking", "sft", "dpo", "hf"}
_SIZE, _DATE = re.compile(r"(\d+x)?[\d.]+[mbt]"), re.compile(r"\d{4}")


def is_hub_id(name: str) -> bool:
    return len(name) < 200 and _ID.fullmatch(name) is not None and _FILE.search(name) is None


def shape_words(name: str) -> tuple[str, ...]:
    """What in a model's name says its shape: two names with the same words are variants of one shape.

    "Meta-Llama-3.1-8B-Instruct" and "meta-llama-3.1:8b" have the same, "Qwen2.5-7B-Instruct-1M" keeps its "1m". A date
    such as 2507 is left out behind or before a size only: alone it may tell apart models of different sizes.
    """
    organisation, slash, own = name.lower().rpartition("/")
    if not _NAME.fullmatch(own):
        return (name,)
    words = [word for word in re.findall(r"\d+x[\d.]+[a-z]*|[\d.]+[a-z]*|[a-z]+", own) if word not in _TRAINED]
    if any(_SIZE.fullmatch(word) for word in words):
        words = [word for word in words if not _DATE.fullmatch(word)]
    return (organisation + slash, *words)
