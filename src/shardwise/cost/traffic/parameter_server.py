"""Parameter servers: which weights each server keeps, what crosses its link, and how long that takes.

Workers push gradients to the servers, which update the weights; workers pull these (Li et al., OSDI 2014). All workers'
bytes cross a server's link, those of an all-reduce are spread over all links: with one server and n workers it carries
n·G in and n·W out, a ring 2·(n−1)/n·G each way at every rank. With as many servers as workers, each with a link of its
own, both carry about the same (Jiang et al., OSDI 2020, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives import CollectiveCost, CollectiveKind, collective_cost, p2p_latency
from shardwise.layout.network import network
from shardwise.layout.servers import ServerPlan
from shardwise.spec.hardware import Cluster


@dataclass(frozen=True)
class ServerPrice:
    """Seconds of one step's exchange, beside those of an all-reduce of the same gradients.

    ``synchronous``: all push, then all pull. ``saturated``: what the busiest link needs for one gradient of every
    worker, both directions at once; asynchronous workers cannot be faster, however little they compute.
    ``unhindered``: one worker alone with the servers.
    """

    synchronous: float
    saturated: float
    unhindered: float
    all_reduce: CollectiveCost

    def asynchronous(self, compute_seconds: float) -> float:
        """A step of every worker: computing and exchanging by itself, unless the servers' links are the limit."""
        return max(compute_seconds + self.unhindered, self.saturated)


def server_price(plan: ServerPlan, cluster: Cluster) -> ServerPrice:
    """Over the outermost network of ``cluster``, whose devices are the workers; each server has a link like theirs."""
    topology = network(cluster)
    level = topology.levels[-1]

    def over_link(size_bytes: float) -> float:
        return float(p2p_latency(size_bytes, level).latency)

    reduced = collective_cost(CollectiveKind.ALL_REDUCE, plan.elements * plan.gradient_bytes, topology, "auto")
    return ServerPrice(
        synchronous=over_link(plan.push_bytes) + over_link(plan.pull_bytes),
        saturated=max(over_link(plan.push_bytes), over_link(plan.pull_bytes)),
        unhindered=over_link(plan.elements * plan.gradient_bytes) + over_link(plan.elements * plan.weight_bytes),
        all_reduce=reduced,
    )
