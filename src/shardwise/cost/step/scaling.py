"""A job's predicted step elsewhere: on more devices (strong and weak scaling), and on other networks.

Strong-scaling efficiency is T1/(N·TN) at a fixed batch, weak-scaling efficiency T1/TN at a batch that grows with N
(Amdahl 1967; Gustafson 1988), with T1 the smallest size in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.memory.room import Fit
from shardwise.cost.memory.transient import communication_buffers, message_buffer_bytes
from shardwise.spec.clusters import port_of_device, squarest
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.network import NetworkLevel


@dataclass(frozen=True)
class ScalingRow:
    """One size of a scaling table; efficiency is relative to the table's first row."""

    devices: int
    data_parallel: int
    sequences: int
    predicted_seconds: float
    tokens_per_second: float
    efficiency: float
    exposed_share: float
    fit: Fit


def scaling_table(job: Job, kind: str, factors: tuple[float, ...] = (1 / 4, 1 / 2, 1, 2, 4, 8)) -> list[ScalingRow]:
    """Rows of the ``"strong"`` or ``"weak"`` table; sizes that the job cannot take are left out."""
    rows: list[ScalingRow] = []
    for factor in factors:
        scaled = _scaled(job, factor, grow_batch=kind == "weak")
        if scaled is None:
            continue
        try:
            analysis = analyze(scaled)
        except SpecError:  # a group would cut across the smaller network
            continue
        rows.append(_row(analysis, rows[0] if rows else None, kind))
    return rows


def _scaled(job: Job, factor: float, *, grow_batch: bool) -> Job | None:
    dp = job.strategy.data_parallel * factor
    devices = job.cluster.devices * factor
    if dp != int(dp) or dp < 1 or devices != int(devices):
        return None
    sequences = job.sequences * factor if grow_batch else job.sequences
    if sequences != int(sequences):
        return None
    try:
        return replace(
            job,
            cluster=job.cluster.with_devices(int(devices)),
            strategy=replace(job.strategy, dp=int(dp)),
            training=replace(job.training, global_batch=int(sequences)),
        )
    except SpecError:
        return None


def _row(analysis: Analysis, first: ScalingRow | None, kind: str) -> ScalingRow:
    devices, seconds = analysis.job.cluster.devices, analysis.predicted_seconds
    efficiency = 1.0
    if first is not None:
        growth = devices / first.devices
        efficiency = first.predicted_seconds / seconds / (growth if kind == "strong" else 1)
    return ScalingRow(
        devices,
        analysis.job.strategy.data_parallel,
        analysis.job.sequences,
        seconds,
        analysis.tokens_per_second,
        efficiency,
        analysis.exposed_share,
        analysis.fit,
    )


# -- One job on other networks: the same devices, strategy and link rates, joined in every textbook topology
# Flat topologies join all devices by one kind of link: a device's share of the cluster's outermost level while all
# send. The hierarchical one is the cluster itself, with its faster levels inside.

Joined = Literal["ring", "tree", "hierarchical", "switch", "mesh", "torus"]
JOINED: tuple[Joined, ...] = ("ring", "tree", "hierarchical", "switch", "mesh", "torus")
_NODE = 8  # devices, of a cluster that has no nodes of its own


@dataclass(frozen=True)
class DimensionOnNetwork:
    """What one dimension does in a step: bytes that its busiest device sends, seconds, and memory of its buffers."""

    algorithms: tuple[str, ...]
    bytes_sent: float
    seconds: float
    exposed_seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class PricedTopology:
    """The job on one network."""

    topology: Joined
    network: str
    predicted_seconds: float
    exposed_share: float
    fit: Fit
    dimensions: dict[str, DimensionOnNetwork]


def compared_topologies(job: Job) -> tuple[PricedTopology, ...]:
    return tuple(_priced(job, name, _with_topology(job.cluster, name)) for name in JOINED)


def _priced(job: Job, name: Joined, cluster: Cluster) -> PricedTopology:
    analysis = analyze(replace(job, cluster=cluster))
    dimensions = {dimension: _dimension(analysis, dimension) for dimension in analysis.exposed_by_dimension()}
    figures = (analysis.predicted_seconds, analysis.exposed_share, analysis.fit)
    return PricedTopology(name, _words(cluster), *figures, dimensions)


def _dimension(analysis: Analysis, name: str) -> DimensionOnNetwork:
    traffics = analysis.dimension_traffics(name)
    return DimensionOnNetwork(
        algorithms=tuple(dict.fromkeys(traffic.cost.algorithm for traffic in traffics)),
        bytes_sent=sum(traffic.bytes_sent for traffic in traffics),
        seconds=sum(traffic.seconds for traffic in traffics),
        exposed_seconds=analysis.parts[name],
        memory_bytes=buffer_bytes(analysis, name),
    )


def buffer_bytes(analysis: Analysis, dimension: str) -> float:
    """Memory of the fullest device that a dimension needs to communicate; for dp, whole layers gathered from shards."""
    job = analysis.job
    if dimension == "dp":
        return analysis.memory.gathered
    messages = job.microbatches * message_buffer_bytes(job) if dimension == "pp" else 0.0
    return communication_buffers(job).get(dimension, 0.0) + messages


def _with_topology(cluster: Cluster, name: Joined) -> Cluster:
    if name == "hierarchical":
        return _hierarchy(cluster)
    grid = next((level for level in cluster.levels if level.shape and level.width == cluster.devices), None)
    port = port_of_device(cluster, name)
    if name in ("mesh", "torus"):
        shape = grid.shape if grid is not None else squarest(cluster.devices)
        level = replace(port, topology=name, size=None, shape=shape)
    else:
        level = replace(port, topology=name, size=cluster.devices)
    return _on(cluster, (level,))


def _hierarchy(cluster: Cluster) -> Cluster:
    """The cluster itself if it has several levels; else a switch in each node, and one of equal rate between them."""
    if sum(level.width > 1 for level in cluster.levels) > 1:
        return cluster
    devices, port = cluster.devices, port_of_device(cluster, "node")
    largest = cluster.node_devices if cluster.node_devices < devices else _NODE
    node = max(size for size in range(1, largest + 1) if devices % size == 0)
    inside, between = replace(port, size=node), replace(port, name="network", size=devices // node)
    return _on(cluster, (inside, between))


def _on(cluster: Cluster, levels: tuple[NetworkLevel, ...]) -> Cluster:
    """The same devices and nodes on another network, of which no single link was measured."""
    return replace(cluster, levels=levels, devices_per_node=cluster.node_devices, wiring=None)


def _words(cluster: Cluster) -> str:
    """How the devices are joined: "nvlink 8 · infiniband 64"."""
    live = [level for level in cluster.levels if level.width > 1]
    return " · ".join(
        f"{level.name} {'x'.join(map(str, level.shape)) if level.shape else level.width}" for level in live
    )
