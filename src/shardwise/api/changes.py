"""Changes of fields: by `--set`, in a file or in a named model or cluster; steps that follow from tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from shardwise.spec.codec import Spec
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.run import Run

_DESCRIBING = ("source", "published_parameters")  # no longer true once something is changed

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
    """A model or cluster with the fields changed that ``overrides`` name (``kind.field``)."""
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
    """Drops sizes that are derived from others, so that they are derived again."""
    if {"hidden", "heads"} & set(changes) and model.head_dim == model.hidden // model.heads:
        fields.pop("head_dim", None)
    if "heads" in changes and model.kv_heads == model.heads:
        fields.pop("kv_heads", None)


def with_steps(run: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run with the steps that ``training.tokens`` takes; raises SpecError if it has others."""
    training = fields.get("training")
    if not isinstance(training, Mapping) or training.get("tokens") is None:
        return dict(run)
    job = Job.from_dict({name: value for name, value in fields.items() if name != "run"})
    tokens = job.training.tokens
    assert tokens is not None
    needed = -(-tokens // job.tokens_per_step)
    if "steps" in run and (steps := _steps(run["steps"])) != needed:
        problem = f"{steps:,} of {job.tokens_per_step:,} tokens are not the {tokens:,} of training.tokens"
        raise SpecError("run.steps", problem, f"leave one of them out, or use {needed}")
    return {**run, "steps": needed}


def _steps(value: Any) -> int:
    try:
        return Run(steps=value).steps
    except SpecError as error:
        raise error.under("run") from None
