"""The price of a gradient reduction: by the backend's own collective, or by our own schedule where the engine runs one.

The backend's is priced as the cluster's library runs it, ours as our executor does. Where `calibrate` has measured our
executor (``schedules`` of every level of a cluster), a named algorithm is priced by it, and "auto" takes the cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology
from shardwise.collectives.arrays import is_array
from shardwise.collectives.cost import select
from shardwise.cost.traffic.traffic import collective_price
from shardwise.layout.gradient_schedules import PAYS_BELOW, UNNAMED, Choice, choose, gradient_groups, named_on
from shardwise.layout.payloads import Payload, Role
from shardwise.spec.errors import SpecError

if TYPE_CHECKING:
    from shardwise.cost.analysis import Analysis


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


@dataclass(frozen=True)
class GradientTime:
    """Seconds per step of a gradient reduction, alone on the network, by the chosen schedule and by the backend."""

    payload: Payload
    choice: Choice
    times: float

    @property
    def seconds(self) -> float:
        return self.times * self.choice.seconds

    @property
    def backend_seconds(self) -> float:
        return self.times * self.choice.backend_seconds


def gradient_times(analysis: Analysis) -> list[GradientTime]:
    """Every gradient reduction that one of our schedules takes over from the backend."""
    job, times = analysis.job, []
    runs_of = {(group.share, group.kind): group.runs for group in gradient_groups(job)}
    for traffic in analysis.dimension_traffics("dp"):
        runs = runs_of.get((traffic.payload.share, traffic.kind))
        if runs is None or traffic.payload.role not in (Role.GRADIENTS, Role.LATE_GRADIENTS):
            continue
        try:
            choice = choose(traffic.kind, traffic.size_bytes, job.cluster, runs, job.strategy.collective)
        except SpecError:  # priced by the cheapest, and refused by the engine
            continue
        if choice.schedule is not None:
            times.append(GradientTime(traffic.payload, choice, traffic.count))
    return times
