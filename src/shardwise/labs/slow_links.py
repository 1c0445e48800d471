"""Virtual nodes with a slow link between them, where this machine can make them; else why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.labs.registry import PRELOAD
from shardwise.launch.emulate.network import EmulatedPool, why_not
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster


@contextmanager
def slow_nodes(emulation: Emulation) -> Iterator[EmulatedPool | str]:
    """A pool on virtual nodes; or, in words, why there is none."""
    reason = why_not()
    if reason is not None:
        yield reason
        return
    with EmulatedPool(emulation, PRELOAD) as pool:
        yield pool


def described(emulation: Emulation) -> Cluster:
    """The same nodes for the planner."""
    return cluster_of(emulation, cluster_from(f"laptop:{emulation.world}"))
