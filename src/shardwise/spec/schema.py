"""The JSON Schema (2020-12) of a job file, for editors: made from the table of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from shardwise.spec.codec import Spec
from shardwise.spec.fields import FieldRecord, fields_of
from shardwise.spec.job import Job

Schema = dict[str, Any]
_NUMBER_WITH_UNIT: Schema = {"type": "string", "pattern": r"^\s*[-+]?[0-9.]"}
_BOUNDS = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum"}


def job_schema() -> Schema:
    """The schema; what several fields must fulfil together is checked by `spec.rules` alone."""
    nouns: dict[str, Schema] = {}
    job = _noun(Job, nouns)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A shardwise job",
        **job,
        "$defs": nouns,
    }


def _noun(cls: type[Spec], nouns: dict[str, Schema]) -> Schema:
    """An object with the fields of ``cls``; adds the nouns that it refers to."""
    records = list(fields_of(cls))
    return {
        "type": "object",
        "description": " ".join((cls.__doc__ or "").split()),
        "properties": {record.name: _field(record, nouns) for record in records},
        "required": [record.name for record in records if record.required],
        "additionalProperties": False,
    }


def _field(record: FieldRecord, nouns: dict[str, Schema]) -> Schema:
    shapes = list(_shapes(record, nouns))
    schema: Schema = {"description": record.documentation, **(shapes[0] if len(shapes) == 1 else {"anyOf": shapes})}
    if isinstance(record.default, (bool, int, float, str)):
        schema["default"] = record.default
    return schema


def _shapes(record: FieldRecord, nouns: dict[str, Schema]) -> Iterator[Schema]:
    """What may stand for a field."""
    metadata = record.metadata
    if "words" in metadata:
        yield {"enum": list(metadata["words"])}
    if "choices" in metadata:
        yield {"enum": list(record.choices)}
    if "resolve" in metadata:  # a name, a file, or a short form that the field reads itself
        yield {"type": ["string", "integer"]}
    for noun in metadata.get("also", ()):
        yield _referred(noun, nouns)
    named = "choices" in metadata and record.noun is None
    for hint in () if named else record.types:
        yield from _of_type(hint, metadata, nouns)
    if type(None) in get_args(record.hint):
        yield {"type": "null"}


def _of_type(hint: Any, metadata: Mapping[str, Any], nouns: dict[str, Schema]) -> Iterator[Schema]:
    origin = get_origin(hint)
    if origin is Literal:
        yield {"enum": list(get_args(hint))}
    elif origin is tuple:
        items = [*_of_type(get_args(hint)[0], metadata, nouns)]
        items += [{"type": "string"}] if "resolve" in metadata else []
        yield {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}
    elif origin is not None and issubclass(origin, Mapping):
        values = [*_of_type(get_args(hint)[1], metadata, nouns)]
        keys = {"propertyNames": {"enum": list(metadata["keys"])}} if "keys" in metadata else {}
        yield {"type": "object", "additionalProperties": {"anyOf": values}, **keys}
    elif issubclass(hint, Spec):
        yield _referred(hint, nouns)
    elif hint in (bool, str):
        yield {"type": {bool: "boolean", str: "string"}[hint]}
    else:
        bounds = {name: metadata[key] for key, name in _BOUNDS.items() if metadata.get(key) is not None}
        yield {"type": "integer" if hint is int else "number", **bounds}
        yield _NUMBER_WITH_UNIT


def _referred(cls: type[Spec], nouns: dict[str, Schema]) -> Schema:
    if cls.__name__ not in nouns:
        nouns[cls.__name__] = {}  # in case it refers to itself
        nouns[cls.__name__] = _noun(cls, nouns)
    return {"$ref": f"#/$defs/{cls.__name__}"}
