"""From a job file and flags to a `Job`: presets, a user's own files, or bare numbers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shardwise.cli import bare
from shardwise.cli.arguments import field_overrides
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job, read_job_fields
from shardwise.spec.model import Model
from shardwise.spec.units import parse


def job_from(arguments: argparse.Namespace) -> Job:
    """The job that a file and flags describe; flags override the file."""
    fields: dict[str, Any] = read_job_fields(arguments.job) if arguments.job else {}
    overrides = field_overrides(arguments)
    bare.check_unused(arguments)
    for path, value in overrides.items():
        _set(fields, path, value)
    fields["model"] = _model(arguments, fields)
    fields["cluster"] = _cluster(arguments, fields)
    if bare.gives_cluster(arguments) and "strategy.collective" not in overrides:
        # Whoever names a bare topology wants its textbook algorithm.
        _set(fields, "strategy.collective", "textbook")
    return Job.from_dict(fields)


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = fields
    for name in parents:
        inner = place.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            raise SpecError(path, f"{name} is {shown(inner)}, which has no fields", "give a mapping in the file")
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = value


def _model(arguments: argparse.Namespace, fields: dict[str, Any]) -> Model:
    named = fields.get("model") if arguments.model is None else arguments.model
    if bare.gives_model(arguments):
        if arguments.model is not None:
            raise SpecError(
                "--model", f"{shown(arguments.model)} and bare numbers exclude each other", "give one of them"
            )
        tensor = fields.get("strategy", {}).get("tp", 1)
        return bare.model(arguments, tensor)
    if named is None:
        raise SpecError("model", "is missing", "name one: --model llama3-8b (`shardwise list models`), or --params ...")
    return model_from(named)


def model_from(named: Any) -> Model:
    """A model by preset name, mapping, our own file, or a Hugging Face config.json (or its folder)."""
    if isinstance(named, str) and presets.looks_like_file(named):
        from pathlib import Path

        path = Path(named)
        if path.is_dir():
            path = path / "config.json"
        if path.suffix.lower() == ".json":
            from shardwise.interop import model_from_hf_config

            try:
                return model_from_hf_config(path)
            except SpecError as error:
                raise error.under("model") from None
    try:
        return presets.resolve("model", Model, named)
    except SpecError as error:
        raise error.under("model") from None


def _cluster(arguments: argparse.Namespace, fields: dict[str, Any]) -> Cluster:
    if bare.gives_cluster(arguments):
        if arguments.cluster is not None:
            raise SpecError(
                "--cluster",
                f"{shown(arguments.cluster)} and --topology exclude each other",
                "give one of them",
            )
        return bare.cluster(arguments)
    named = fields.get("cluster") if arguments.cluster is None else arguments.cluster
    if named is None:
        raise SpecError(
            "cluster",
            "is missing",
            "name one: --cluster dgx-h100:4 (`shardwise list clusters`), or --topology ... --gpus N",
        )
    try:
        cluster = cluster_from(named)
    except SpecError as error:
        raise error.under("cluster" if not error.field.startswith("cluster") else "") from None
    if arguments.gpus_per_node is not None:
        cluster = cluster.with_node_devices(whole(arguments.gpus_per_node, "--gpus-per-node"))
    if arguments.gpus is not None:
        cluster = cluster.with_devices(whole(arguments.gpus, "--gpus"))
    return cluster


def whole(text: str, field: str) -> int:
    """A positive whole number given to a flag."""
    number = parse(text, "count", field)
    if number != int(number) or number < 1 or number > 10**9:
        raise SpecError(field, f"{shown(text)} is not a positive whole number", "write one like 64")
    return int(number)
