"""What a file is by its content: our own job, a Hugging Face ``config.json``, or the configuration of a framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, TypeGuard

from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json, parse_yaml
from shardwise.spec.job import Job

JOB, CONFIG = "job", "config.json"
MOST_CHARACTERS = 4 * 2**20  # of a file that may be a configuration
_TELLING = (".json", ".yaml", ".yml", ".toml", ".sh")  # others are those of any text
_TOML_SECTION = re.compile(r"^[ \t]*\[{1,2}[A-Za-z_][\w.-]*\]{1,2}[ \t\r]*(#.*)?$", re.MULTILINE)
_COMMAND = re.compile(r"(^|[\s\"'(])--[a-z]|\.py(\s|$)")
_BRACE = re.compile(r"(?>\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*+\{", re.DOTALL)  # after comments


def kind_of(text: str, name: str = "") -> str:
    """`JOB`, `CONFIG` or the name of a framework; what is none of them is read as a job, whose rules then say why not.

    ``name`` is that of the file, where it has one: what its ending says of the format is not guessed.
    """
    suffix = PurePath(name).suffix.lower()
    suffix = suffix if suffix in _TELLING else format_of(text)
    if suffix in (".yaml", ".yml") and _is_ours(text):
        return JOB
    if suffix == ".json" and is_hf_config(_json(text)):
        return CONFIG
    # The frameworks' tables are only loaded for a file that is not clearly ours.
    from shardwise.interop.frameworks import recognised

    return recognised(text, suffix) or JOB


def format_of(text: str) -> str:
    """The format that a text is written in, as the ending of its files."""
    if text.startswith("#!"):
        return ".sh"
    if _BRACE.match(text):
        return ".json"
    if _TOML_SECTION.search(text):
        return ".toml"
    return ".sh" if _COMMAND.search(text) and not isinstance(_yaml(text), Mapping) else ".yaml"


def is_hf_config(data: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a model is written as in a ``config.json``, not in our own fields."""
    return isinstance(data, Mapping) and ("model_type" in data or "text_config" in data)


def _is_ours(text: str) -> bool:
    """Whether a YAML file has no fields but those of a job, or none at all."""
    data = _yaml(text)
    return not isinstance(data, Mapping) or set(data) <= {field.name for field in fields(Job)}


def _yaml(text: str) -> Any:
    try:
        return parse_yaml(text)
    except SpecError:
        return None


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except SpecError:
        return None
