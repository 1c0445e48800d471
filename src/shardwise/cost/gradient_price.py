"""The price of a sum of gradients: by the backend's own collective, or by a schedule of ours where the engine runs one.

Where `calibrate` measured how messages of our executor fare (``schedules`` of every level of a cluster), a named
algorithm is priced so, and "auto" takes the cheaper of both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology
from shardwise.collectives.arrays import is_array
from shardwise.collectives.cost import select, without_unit_levels
from shardwise.cost.network import spanned
from shardwise.cost.traffic import collective_price
from shardwise.layout.groups import RankRun
from shardwise.spec.hardware import Cluster

PAYS_BELOW = 0.9  # of the backend's time: a model is not exact to a tenth
MOST_RANKS = 64  # whose schedules are built to be compared
UNNAMED = ("auto", "textbook")


def by_schedules(cluster: Cluster, runs: tuple[RankRun, ...]) -> Topology:
    """The group's network as our executor uses it, which overlaps the levels."""
    network = spanned(cluster.run_by_schedules(), runs, "strategy.collective")
    assert network is not None
    return replace(network, pipelined_levels=True)


def measured_schedules(cluster: Cluster, runs: tuple[RankRun, ...]) -> Topology | None:
    """The same where gloo would send and our messages were measured; NCCL knows its own wires better."""
    measured = all(level.schedules is not None for level in cluster.levels if level.width > 1)
    if not runs or cluster.library != "gloo" or not measured:
        return None
    network = by_schedules(cluster, runs)
    return network if network.size <= MOST_RANKS else None


def named_on(wanted: str, network: Topology) -> str:
    """A ring over several levels is the flat one."""
    slim, _ = without_unit_levels(network)
    return "flat_ring" if wanted == "ring" and len(slim.levels) > 1 else wanted


def gradient_price(
    kind: CollectiveKind, size_bytes: Any, network: Topology, ours: Topology | None, algorithm: str
) -> CollectiveCost:
    """``ours`` is `measured_schedules`; sizes are one number or an array."""
    if ours is not None and algorithm not in UNNAMED:
        return collective_price(kind, size_bytes, ours, named_on(algorithm, ours))
    backend = collective_price(kind, size_bytes, network, algorithm)
    if ours is None or algorithm != "auto":
        return backend
    own = collective_price(kind, size_bytes, ours, "auto")
    pays = own.seconds < PAYS_BELOW * backend.seconds
    if not is_array(size_bytes):
        return own if pays else backend
    return select([backend, own], [~pays, pays])
