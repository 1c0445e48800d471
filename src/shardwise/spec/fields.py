"""The one table of a job's fields, read off the dataclasses.

A field of a dataclass is the home of its type, default, range, unit, choices, flag and line of documentation. Flags and
their help, keywords of the API, the page's list, the schema of job files, completion and `docs/job-file.md` are made
from the records below.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from shardwise.spec.bare import BareNumbers
from shardwise.spec.codec import Spec, default_of, hinted_fields, is_required
from shardwise.spec.errors import join_path
from shardwise.spec.job import Job

# Parts of a job whose fields are keywords without the name of the part.
KEYWORD_PARTS = ("strategy", "training")


@dataclass(frozen=True)
class FieldRecord:
    """What is known of a field of a job."""

    path: str
    """Its place in a job file, such as ``strategy.zero``; of a bare number its name."""
    owner: type
    """The dataclass that it is a field of."""
    hint: Any
    """Its type."""
    required: bool
    default: Any
    """None too where it is required."""
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The flag that sets it; empty if only `--set` does."""
        flag: str = self.metadata.get("flag", "")
        return flag

    @property
    def keyword(self) -> str:
        """The keyword of the API that sets it; empty if only a mapping around it does."""
        part, _, inner = self.path.partition(".")
        alone = part in KEYWORD_PARTS and inner and "." not in inner
        return self.name if alone or self.flag else ""

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value, and sets the opposite of the default."""
        return self.hint is bool

    @property
    def is_list(self) -> bool:
        """Whether text with commas is a list of values."""
        return any(get_origin(option) is tuple for option in self.types)

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that it may have, None left out."""
        options = get_args(self.hint) if get_origin(self.hint) in (Union, types.UnionType) else (self.hint,)
        return tuple(option for option in options if option is not type(None))

    @property
    def noun(self) -> type[Spec] | None:
        """The dataclass of its own fields, if it has some."""
        nouns = (option for option in self.types if isinstance(option, type) and issubclass(option, Spec))
        return next(nouns, None)

    @property
    def is_preset(self) -> bool:
        """Whether a preset or a file may stand for its fields."""
        return self.noun is not None and "choices" in self.metadata

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that its type or a table names; others may be possible."""
        if "choices" in self.metadata:
            return tuple(self.metadata["choices"]())
        items = (get_args(option)[0] if get_origin(option) is tuple else option for option in self.types)
        return tuple(choice for item in items if get_origin(item) is Literal for choice in get_args(item))

    @property
    def documentation(self) -> str:
        """The lines below the field."""
        return _documentation(self.owner).get(self.name, "")

    @property
    def help(self) -> str:
        """One line for a flag: the first sentence of the documentation, and the choices that it does not name."""
        if "help" in self.metadata:
            return str(self.metadata["help"])
        first = re.split(r"\.(?:\s|$)", self.documentation, maxsplit=1)[0].replace("`", "")
        word = first.partition(" ")[0]
        text = first[:1].lower() + first[1:] if word[1:] == word[1:].lower() else first
        choices = () if self.is_preset else tuple(map(str, self.choices))
        unnamed = any(not re.search(rf"\b{re.escape(choice)}\b", first) for choice in choices)
        return f"{text} ({', '.join(choices)})" if unnamed else text


def fields_of(owner: type, prefix: str = "") -> Iterator[FieldRecord]:
    """The fields of one dataclass."""
    for field, hint in hinted_fields(owner):
        required = is_required(field)
        default = None if required else default_of(field)
        yield FieldRecord(join_path(prefix, field.name), owner, hint, required, default, field.metadata)


def walk(owner: type, prefix: str = "") -> Iterator[FieldRecord]:
    """The fields of a dataclass and of those inside it; not of presets and files, which have a page of their own."""
    for record in fields_of(owner, prefix):
        yield record
        if record.noun is not None and not record.is_preset:
            yield from walk(record.noun, record.path)


@functools.cache
def job_fields() -> dict[str, FieldRecord]:
    """Every field of a job and every bare number, by its path."""
    return {record.path: record for owner in (Job, BareNumbers) for record in walk(owner)}


@functools.cache
def keyword_paths() -> dict[str, str]:
    """The path of the field that each keyword sets."""
    return {record.keyword: path for path, record in job_fields().items() if record.keyword}


def parts() -> tuple[str, ...]:
    """The parts of a job that are mappings of fields, and keywords as such."""
    return tuple(record.path for record in fields_of(Job) if record.noun is not None and not record.is_preset)


def flag_of(path: str) -> str:
    """The flag that sets a field; empty if there is none of its own."""
    record = job_fields().get(path)
    return record.flag if record is not None else ""


@functools.cache
def _documentation(owner: type) -> dict[str, str]:
    """The line under each field of a dataclass and of those it extends, from their source: Python does not keep it."""
    lines: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if dataclasses.is_dataclass(base):
            lines |= _documented(base.__module__).get(base.__qualname__, {})
    return lines


@functools.cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """The lines under the fields of every class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # installed without its source
        return {}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_lines_under_fields(node)) for node in classes}


def _lines_under_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, " ".join(below.value.value.split())
