"""Fields that `--set` changes: in what a file spells out, and in a model or cluster that has only a name there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from shardwise.spec.codec import Spec
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model

_DESCRIBING = ("source", "published_parameters")  # what was published is no longer true of a changed one

Noun = TypeVar("Noun", bound=Spec)


def set_field(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = fields
    for name in parents:
        inner = place.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            raise SpecError(path, f"{name} is {shown(inner)}, which has no fields", "give a mapping in the file")
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = value


def changed(noun: Noun, kind: str, overrides: Mapping[str, Any]) -> Noun:
    """A model or cluster with those of its fields changed that ``overrides`` name (``kind.field``)."""
    changes = {path.partition(".")[2]: value for path, value in overrides.items() if path.startswith(f"{kind}.")}
    if not changes:
        return noun
    fields = {name: value for name, value in noun.to_dict().items() if name not in _DESCRIBING}
    if isinstance(noun, Model):
        _leave_derived(noun, fields, changes)
    if fields.get("name"):
        fields["name"] = f"{fields['name']}-changed"
    try:
        for path, value in changes.items():
            set_field(fields, path, value)
        return type(noun).from_dict(fields)
    except SpecError as error:
        raise error.under(kind) from None


def _leave_derived(model: Model, fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Sizes that follow from others do so from the changed ones."""
    if {"hidden", "heads"} & set(changes) and model.head_dim == model.hidden // model.heads:
        fields.pop("head_dim", None)
    if "heads" in changes and model.kv_heads == model.heads:
        fields.pop("kv_heads", None)
