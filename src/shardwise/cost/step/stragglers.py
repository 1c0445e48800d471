"""What a synchronous step waits for because devices are not equally fast: the slowest of n."""

from __future__ import annotations

import math

from shardwise.spec.hardware import Cluster
from shardwise.spec.stack import Stack


def slowest_of(count: int) -> float:
    """How many standard deviations the slowest of ``count`` is behind the mean: at most √(2 ln n).

    Boucheron, Lugosi and Massart 2013, "Concentration Inequalities", section 2.5; near it for many.
    """
    return math.sqrt(2 * math.log(count))


def waiting_share(cluster: Cluster, stack: Stack, *, gathers_once: bool) -> float:
    """Share of the layers' time that all devices wait for the slowest.

    Once a step for the slowest device; where parameters are gathered for every layer by hosts that launch kernel after
    kernel, in every layer for the slowest node at that moment.
    """
    efficiency = cluster.device.efficiency
    share = efficiency.device_spread * slowest_of(cluster.devices)
    if gathers_once or stack.elementwise != "eager":
        return share
    return share + efficiency.layer_jitter * slowest_of(cluster.nodes)
