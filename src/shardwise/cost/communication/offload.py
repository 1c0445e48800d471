"""Offload: what moves between a device and its host or disk in one step.

The optimizer's share sends gradients down and updated weights up once a step (Ren et al. 2021, ZeRO-Offload,
arXiv 2101.06840); offloaded activations go down in the forward and up in the backward pass of every microbatch.
"""

from __future__ import annotations

from shardwise.collectives import CollectiveKind, Level, Topology
from shardwise.collectives.shapes import Switch
from shardwise.cost.in_flight import chunks_in_flight
from shardwise.cost.memory import activation_bytes
from shardwise.cost.stages import RankContents
from shardwise.cost.states import expert_shards
from shardwise.cost.traffic import Traffic, Window, priced
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


def offload_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Transfers over the device's own link to its host, or to the node's first storage level."""
    offload, recipe = job.strategy.offload, job.training.recipe
    if not offload.any:
        return []
    link = _host_topology(job)
    strategy, m = job.strategy, job.microbatches
    shards = strategy.sharding_group if strategy.zero else 1
    owned = contents.dense / shards + contents.experts / (expert_shards(strategy) if strategy.zero else 1)

    def held(sharded: bool) -> float:
        return owned if sharded else contents.total

    def line(what: str, size: float, count: float, window: Window, share: float) -> Traffic:
        return priced(
            "offload",
            what,
            CollectiveKind.SEND_RECV,
            size,
            count,
            link,
            "auto",
            window=window if strategy.overlap.offload else "none",
            window_share=share,
        )

    traffics = []
    if offload.optimizer:
        moved = owned * offload.optimizer  # less what lives on the host anyway
        down, up = moved * (1 - offload.gradients), moved * (1 - offload.weights)
        if down:
            traffics.append(line("gradients to host", down * recipe.gradient, 1, "backward", 1 / m))
        if up:
            traffics.append(line("updated weights from host", up * recipe.weight, 1, "forward", 1 / m))
    if offload.weights:
        size = held(strategy.zero == 3) * recipe.weight * offload.weights
        traffics.append(line("weights from host, forward", size, m, "forward", 1.0))
        traffics.append(line("weights from host, backward", size, m, "backward", 1.0))
    if offload.gradients:
        size = held(strategy.gradients_sharded) * recipe.gradient * offload.gradients
        traffics.append(line("gradients to host", size, m, "backward", 1.0))
    if offload.activations:
        in_flight = chunks_in_flight(job, contents.rank) / strategy.chunks_per_rank
        one = activation_bytes(job, contents) / in_flight * offload.activations
        traffics += [
            line("activations to host", one, m, "forward", 1.0),
            line("activations from host", one, m, "backward", 1.0),
        ]
    return traffics


def _host_topology(job: Job) -> Topology:
    cluster = job.cluster
    if job.strategy.offload.target == "nvme":
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
