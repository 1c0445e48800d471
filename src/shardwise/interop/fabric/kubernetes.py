"""Switches above the nodes, as labels of Kubernetes nodes say it: what `kubectl get nodes -o json` prints.

Sources: docs.nvidia.com/topograph/reference/node-labels-and-annotations (0.x: network.topology.nvidia.com/...; 1.x:
fabric.topograph.run/tier-N, tier 0 nearest; accelerator domains), GKE's cloud.google.com/gce-topology-...,
kubernetes.io/docs/reference/labels-annotations-taints (zone and region).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import IN_BULK, parse_json

# The nearest first. Of labels for the same thing, the first that a node has counts.
LABELS: tuple[tuple[str, ...], ...] = (
    ("nvidia.com/gpu.clique", "accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator"),
    (
        "fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block",
        "cloud.google.com/gce-topology-subblock",
    ),
    ("fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine", "cloud.google.com/gce-topology-block"),
    ("fabric.topograph.run/tier-2", "network.topology.nvidia.com/core", "network.topology.nvidia.com/datacenter"),
    ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"),
    ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"),
)  # fmt: skip


def read_kubernetes(text: str, field: str = "nodes") -> dict[str, tuple[str, ...]]:
    """By node the switches, zones and regions that it is in, the nearest first; tiers that no node has are left out."""
    try:
        items = parse_json(text, most_values=IN_BULK)["items"]
        labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in items}
    except (ValueError, KeyError, TypeError):
        problem = f"{shown(text)} is not a list of nodes"
        raise SpecError(field, problem, "give what `kubectl get nodes -o json` prints") from None
    tiers = [tier for tier in LABELS if any(_value(tier, own) for own in labels.values())]
    if not tiers:
        raise SpecError(field, "no node has a label of its place", "topology.kubernetes.io/zone is the least")
    # A node without a label is in a place of its own there: nothing says that it is near to another.
    return {name: tuple(_value(tier, own) or f"of {name}" for tier in tiers) for name, own in labels.items()}


def _value(tier: tuple[str, ...], labels: Mapping[str, Any]) -> str:
    """A place is only the same where the label is."""
    return next((f"{name}={labels[name]}" for name in tier if labels.get(name)), "")
