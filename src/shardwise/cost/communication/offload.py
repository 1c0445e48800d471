"""Offload: what moves between a device and its host or disk in one step.

The optimizer's share sends gradients down and updated weights up once a step (Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840); offloaded activations go down in the forward and up in the backward pass of every microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.collectives import CollectiveKind, Level, Topology
from shardwise.collectives.arrays import select
from shardwise.collectives.shapes import Switch
from shardwise.cost.in_flight import chunks_in_flight
from shardwise.cost.memory import activation_bytes
from shardwise.cost.overlap import Pass
from shardwise.cost.stages import RankContents
from shardwise.cost.states import Sharding, owned_parameters, sharding_of
from shardwise.cost.traffic import Traffic, priced
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.training import Recipe


@dataclass(frozen=True)
class OffloadLine:
    """One kind of transfer: bytes of one, how many in a step, under what."""

    what: str
    size_bytes: Any
    count: Any
    window: Pass
    window_share: Any = 1.0
    last_only: bool = False


def state_lines(contents: RankContents, sharding: Sharding, recipe: Recipe, microbatches: Any) -> list[OffloadLine]:
    """Every transfer of weights, gradients and optimizer results that there may be."""
    offload, m = sharding.offload, microbatches
    owned = owned_parameters(contents, sharding)
    moved = owned * offload.optimizer  # less what lives on the host anyway
    weights = select(sharding.zero == 3, owned, contents.total) * recipe.weight * offload.weights
    gradients = (owned if sharding.gradients_sharded else contents.total) * recipe.gradient * offload.gradients
    down, up = moved * (1 - offload.gradients) * recipe.gradient, moved * (1 - offload.weights) * recipe.weight
    return [
        OffloadLine("gradients to host, after the last microbatch", down, 1, "backward", 1 / m, True),
        OffloadLine("updated weights from host", up, 1, "forward", 1 / m, True),
        OffloadLine("weights from host, forward", weights, m, "forward"),
        OffloadLine("weights from host, backward", weights, m, "backward"),
        OffloadLine("gradients to host", gradients, m, "backward"),
    ]


def activation_lines(moved_bytes: Any, microbatches: Any) -> list[OffloadLine]:
    """Activations of every microbatch, out in the forward and back in the backward pass."""
    return [
        OffloadLine("activations to host", moved_bytes, microbatches, "forward"),
        OffloadLine("activations from host", moved_bytes, microbatches, "backward"),
    ]


def offload_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Transfers over the device's own link to its host, or to the node's first storage level."""
    strategy, m = job.strategy, job.microbatches
    if not strategy.offload.any:
        return []
    link = host_topology(job.cluster, strategy.offload.target)
    in_flight = chunks_in_flight(job, contents.rank) / strategy.chunks_per_rank
    moved = activation_bytes(job, contents) / in_flight * strategy.offload.activations
    lines = state_lines(contents, sharding_of(strategy), job.recipe, m) + activation_lines(moved, m)
    return [
        priced(
            "offload",
            line.what,
            CollectiveKind.SEND_RECV,
            line.size_bytes,
            line.count,
            link,
            "auto",
            window=line.window if strategy.overlap.offload else "none",
            window_share=line.window_share,
            last_only=line.last_only,
        )
        for line in lines
        if line.size_bytes
    ]


def host_topology(cluster: Cluster, target: str) -> Topology:
    """The one link that offload to ``target`` goes over, as a network of two."""
    if target == "nvme":
        if not cluster.storage:
            raise SpecError(
                "strategy.offload.target", "nvme, but the cluster names no storage", "add storage, or use cpu"
            )
        disk = cluster.storage[0]
        bandwidth = disk.bandwidth(1) / cluster.node_devices
        return _one_link(bandwidth, disk.link.latency, disk.name)
    if cluster.host_link is None:
        raise SpecError("strategy.offload", "the cluster names no host_link", "add one, such as host_link: pcie-4")
    link = cluster.host_link
    return _one_link(link.bandwidth * link.efficiency, link.latency, "host link")


def _one_link(bandwidth: float, latency: float, name: str) -> Topology:
    return Topology((Level(Switch(2), bandwidth, latency, name=name),))
