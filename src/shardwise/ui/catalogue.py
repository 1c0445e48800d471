"""What can be picked on the page: presets of models, clusters and stacks, with a few words on each."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from shardwise.api.inputs import NOT_SEARCHED
from shardwise.interop.frameworks import TARGETS
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.model import Model
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_count

# The job of a page that is opened without one, as in the README.
FIRST: dict[str, Any] = {
    "model": "llama3-70b", "cluster": "dgx-h100:8", "global_batch": 512, "seq": 8192,
    "tp": 8, "pp": 2, "zero": 1, "precision": "bf16",
}  # fmt: skip


@cache
def catalogue() -> dict[str, Any]:
    """Presets by kind, the job to begin with, and which of its keywords a search varies."""
    return {
        "models": [_model(name) for name in presets.names("model")],
        "clusters": [_cluster(name) for name in presets.names("cluster")],
        "stacks": presets.names("stack"),
        "frameworks": list(TARGETS),
        "first": FIRST,
        "varied": [item.name for item in fields(Strategy) if item.name not in NOT_SEARCHED],
    }


def _model(name: str) -> dict[str, Any]:
    model = presets.load("model", Model, name)
    total, active = parameter_count(model), active_parameter_count(model)
    words = f"{readable_count(total)} parameters" + (f", {readable_count(active)} active" if model.moe else "")
    return {"name": name, "words": words, "max_seq": model.max_seq}


def _cluster(name: str) -> dict[str, Any]:
    """A cluster preset; ``shape`` is None unless its size is that of a mesh or torus."""
    cluster = cluster_from(name)
    shape = next((list(level.shape) for level in cluster.levels if level.shape), None)
    words = f"{cluster.node_devices} × {cluster.device.name} a node"
    return {"name": name, "words": words, "shape": shape, "devices": cluster.devices, "nodes": cluster.nodes}
