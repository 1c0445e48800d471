"""The cluster that a measuring verb is told to measure, by name."""

from __future__ import annotations

from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster


def named_cluster(name: str) -> Cluster:
    try:
        return cluster_from(name)
    except SpecError as error:
        raise error.under("--cluster") from None


def cluster_of_ranks(name: str, ranks: int) -> Cluster:
    """The cluster of that name, which must have as many devices as there are ranks."""
    cluster = named_cluster(name)
    if cluster.devices == ranks:
        return cluster
    nodes, rest = divmod(ranks, cluster.levels[0].width)
    remedy = (
        f"start a multiple of {cluster.levels[0].width}" if rest else f"name it like {name.partition(':')[0]}:{nodes}"
    )
    raise SpecError("--cluster", f"{cluster.name} has {cluster.devices} devices, there are {ranks} ranks", remedy)
