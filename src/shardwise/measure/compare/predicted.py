"""The same parts as the planner prices them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from shardwise.collectives import CollectiveKind
from shardwise.cost.memory.device import DeviceMemory
from shardwise.cost.step.parts import step_parts
from shardwise.cost.traffic.network import network, spanned
from shardwise.cost.traffic.traffic import collective_price
from shardwise.layout.groups import expert_runs, group_runs
from shardwise.layout.ranks import node_of
from shardwise.measure.compare.exchanges import Exchange
from shardwise.planner.candidate import Candidate, candidate
from shardwise.spec.job import Job

_DIMENSIONS = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("cp", "dp"), "world": ("tp", "cp", "dp", "pp")}


@dataclass(frozen=True)
class Predicted:
    """``parts`` add up to the step; ``hidden`` as for what is measured."""

    price: Candidate
    parts: dict[str, float]
    hidden: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return self.price.step_seconds

    @property
    def memory(self) -> DeviceMemory:
        return self.price.memory


def predicted(job: Job) -> Predicted:
    price = candidate(job)
    parts = dict(price.parts)
    parts["compute"] += parts.pop("recompute")
    messages = step_parts(price.simulated)["pp"]
    parts["pp"], parts["bubble"] = messages, parts["bubble"] - messages
    hidden: dict[str, float] = defaultdict(float)
    for traffic in price.prediction.slowest.traffics:
        hidden[traffic.dimension] += traffic.hidden_seconds
    return Predicted(price, parts, dict(hidden))


def exchange_seconds(job: Job, one: Exchange) -> float | None:
    """The price of one collective or message; None for what has no price by itself."""
    kind = one.label.collective
    if kind is None:
        return None
    if kind is CollectiveKind.SEND_RECV:
        return _message(job, one)
    strategy = job.strategy
    runs = expert_runs(strategy) if one.dimension == "ep" else group_runs(strategy, _DIMENSIONS.get(one.dimension, ()))
    topology = spanned(job.cluster, runs, "strategy")
    if topology is None or prod(level.size for level in topology.levels) != len(one.members):
        return None
    size = one.bytes * (len(one.members) if kind is CollectiveKind.ALL_GATHER else 1)
    return float(collective_price(kind, float(size), topology, strategy.collective).seconds)


def _message(job: Job, one: Exchange) -> float:
    """Over the innermost level that both ranks share."""
    inside = 1
    for level in (levels := network(job.cluster).levels):
        inside *= level.size
        if node_of(one.members[0], inside) == node_of(one.members[-1], inside):
            break
    else:
        level = levels[-1]
    return float(level.latency + level.startup + one.bytes / (level.bandwidth * level.efficiency))
