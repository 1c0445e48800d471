"""Writes the schemas beside this file, closed, from the packages that publish them (README.md says which).

Not a test: run it in an environment of its own to move to newer ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_WORDS = ("description", "title", "default", "$schema", "$id")
_CONFIG_MAP = "io.k8s.api.core.v1.ConfigMap"
# The generated models wrap what is a number or a text in an object of their own.
_EITHER = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"]},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}


def bare(schema: Any) -> Any:
    """Without prose: a name below `properties` is a field, whatever it is called."""
    if isinstance(schema, list):
        return [bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {field: bare(one) for field, one in value.items()}
        if name in ("properties", "$defs", "patternProperties")
        else bare(value)
        for name, value in schema.items()
        if name not in _WORDS and not name.startswith("x-kubernetes-")
    }


def closed(schema: Any) -> Any:
    """As published a schema lets an unknown field pass: here none does where fields are defined."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: {field: closed(one) for field, one in value.items()}
        if name in ("properties", "$defs", "patternProperties")
        else closed(value)
        for name, value in schema.items()
    }
    return {**found, "additionalProperties": False} if schema.get("properties") else found


def kubernetes() -> dict[str, Any]:
    """A schema for every kind of object; the definitions are those that they reach."""
    import kubernetes_validate
    from kubeflow_trainer_api import models
    from pydantic.json_schema import models_json_schema

    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    _, found = models_json_schema([(one, "validation") for one in kinds.values()], by_alias=True)
    published = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema/v1.37.0-local/_definitions.json"
    config_map = json.loads(published.read_text(encoding="utf-8"))["$defs"][_CONFIG_MAP]
    config_map["properties"]["metadata"] = {"$ref": "#/$defs/IoK8sApimachineryPkgApisMetaV1ObjectMeta"}
    objects = {kind: {"$ref": f"#/$defs/{one.__name__}"} for kind, one in kinds.items()} | {"ConfigMap": config_map}
    return {"objects": bare(objects), "$defs": bare(found["$defs"]) | _EITHER}


def skypilot() -> dict[str, Any]:
    """A task, with what SkyPilot validates apart from it (resources, mounts, volumes) in its place."""
    from sky.utils import schemas

    task = schemas.get_task_schema()
    storage = {"anyOf": [{"type": "string"}, schemas.get_storage_schema()]}
    task["properties"] |= {
        "resources": _public(schemas.get_resources_schema()),
        "file_mounts": {"type": "object", "additionalProperties": storage},
        "volumes": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    for unused in ("service", "pool", "config", "file_mounts_mapping", "volume_mounts"):
        del task["properties"][unused]
    found: dict[str, Any] = bare(_public(task))
    return found


def _public(schema: Any) -> Any:
    """Without the fields that SkyPilot keeps for itself, which begin with a line."""
    if isinstance(schema, list):
        return [_public(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _public(value) for name, value in schema.items() if not name.startswith("_")}


def main() -> None:
    for name, made in (("kubernetes", kubernetes()), ("skypilot", skypilot())):
        (HERE / f"{name}.json").write_text(json.dumps(closed(made), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
