"""Time against money: the same job on fewer devices."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.candidate import Candidate
from shardwise.planner.plan import Plan, plan
from shardwise.spec.errors import SpecError

_MOST_SIZES = 5


@dataclass(frozen=True)
class Size:
    """The fastest strategy on some of the devices."""

    devices: int
    best: Candidate

    @property
    def device_seconds_per_token(self) -> float:
        """What money is proportional to."""
        return self.devices * self.best.seconds_per_token


def sizes(found: Plan) -> tuple[Size, ...]:
    """All devices, half of them, a quarter, ... while something fits; those that cost no less are left out."""
    result = [Size(found.request.job.cluster.devices, found.fastest)]
    cluster = found.request.job.cluster
    while len(result) < _MOST_SIZES and not found.request.deadline.leaves_out():
        try:
            cluster = cluster.with_devices(cluster.devices // 2)
        except SpecError:
            break
        other = plan(found.request.on(cluster))
        if not isinstance(other, Plan):
            break
        result.append(Size(cluster.devices, other.fastest))
    front: list[Size] = []
    for one in result:
        if not front or one.device_seconds_per_token < front[-1].device_seconds_per_token:
            front.append(one)
    return tuple(front)
