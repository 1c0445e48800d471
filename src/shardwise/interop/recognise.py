"""What a file is by its content: our own job, a Hugging Face ``config.json``, or something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, TypeGuard

from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json, parse_yaml
from shardwise.spec.job import Job

JOB, CONFIG = "job", "config.json"
_TELLING = (".json", ".yaml", ".yml", ".toml", ".sh")  # other suffixes may be those of any text
_TOML_SECTION = re.compile(r"^[ \t]*\[{1,2}[A-Za-z_][\w.-]*\]{1,2}[ \t\r]*(#.*)?$", re.MULTILINE)
_COMMAND = re.compile(r"(^|[\s\"'(])--[a-z]|\.py(\s|$)")
_BRACE = re.compile(r"(?>\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*+\{", re.DOTALL)  # after comments


def own_kind(text: str, name: str = "") -> str | None:
    """`JOB` or `CONFIG` where a text is clearly one of them; ``name`` is that of its file, where it has one."""
    suffix = suffix_of(text, name)
    if suffix in (".yaml", ".yml") and _is_ours(text):
        return JOB
    return CONFIG if suffix == ".json" and is_hf_config(_parsed(parse_json, text)) else None


def suffix_of(text: str, name: str = "") -> str:
    """The format of a text, as the suffix of its files: that of its name, or as it is written."""
    suffix = PurePath(name).suffix.lower()
    if suffix in _TELLING:
        return suffix
    if text.startswith("#!"):
        return ".sh"
    if _BRACE.match(text):
        return ".json"
    if _TOML_SECTION.search(text):
        return ".toml"
    return ".sh" if _COMMAND.search(text) and not isinstance(_parsed(parse_yaml, text), Mapping) else ".yaml"


def is_hf_config(data: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a model is written as in a ``config.json``, not in our own fields."""
    return isinstance(data, Mapping) and ("model_type" in data or "text_config" in data)


def _is_ours(text: str) -> bool:
    """Whether a YAML file has no fields but those of a job, or none at all."""
    data = _parsed(parse_yaml, text)
    return not isinstance(data, Mapping) or set(data) <= {field.name for field in fields(Job)}


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except SpecError:
        return None
