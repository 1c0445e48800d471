"""The published schemas in `schemas/`: what is wrong with a document, and what a document could get wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_FOLDER = Path(__file__).parent / "schemas"
_API_VERSIONS = {
    "ConfigMap": "v1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}


@cache
def published(name: str) -> Any:
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def problems(document: dict[str, Any]) -> list[str]:
    """Of an object of Kubernetes, or else a task of SkyPilot."""
    if "kind" not in document:
        return [error.message for error in Draft202012Validator(published("skypilot")).iter_errors(document)]
    kind, schemas = document["kind"], published("kubernetes")
    if document.get("apiVersion") != _API_VERSIONS.get(kind):
        return [f"{document.get('apiVersion')} {kind} is not known"]
    schema = {**schemas["objects"][kind], "$defs": schemas["$defs"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(document)]


def objects_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of a schema that defines fields, and where it is."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from objects_of(one, f"{path}/{number}")
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and path.rpartition("/")[2] != "properties":
            yield path, schema
        for name, one in schema.items():
            yield from objects_of(one, f"{path}/{name}")


_MAPS = {
    "labels", "annotations", "data", "nodeSelector", "limits", "requests",  # Kubernetes
    "envs", "volumes", "file_mounts", "accelerators",  # SkyPilot
}  # fmt: skip


def with_unknown_fields(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document with a field too many, in each of its objects that is no free map of names."""

    def places(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(part, dict):
            if not path or path[-1] not in _MAPS:
                yield path
            for name, one in part.items():
                yield from places(one, (*path, name))
        elif isinstance(part, list):
            for number, one in enumerate(part):
                yield from places(one, (*path, number))

    for path in places(document, ()):
        wrong = deepcopy(document)
        inner = wrong
        for name in path:
            inner = inner[name]
        inner["notAField"] = "x"
        yield "/".join(map(str, path)) or "(top)", wrong
