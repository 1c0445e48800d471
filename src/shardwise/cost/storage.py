"""Checkpoints and data against the cluster's storage: seconds to write and read, bytes per second needed."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.analysis import Analysis
from shardwise.spec.parameters import embedding_parameters, head_parameters
from shardwise.spec.training import OPTIMIZERS

TOKEN_BYTES = 4  # token ids above 65,535 need four bytes


@dataclass(frozen=True)
class StorageCost:
    """One storage level: the whole cluster's bandwidth, and what this job asks of it."""

    name: str
    bandwidth: float
    write_seconds: float
    read_seconds: float
    data_rate_share: float


def checkpoint_bytes(analysis: Analysis) -> float:
    """One checkpoint of the whole model: weights in the recipe's format, master weights, optimizer states."""
    recipe, states = analysis.job.training.recipe, OPTIMIZERS[analysis.job.training.optimizer]
    model = analysis.job.model
    ends = embedding_parameters(model) + head_parameters(model)
    matrices = analysis.trained_parameters - ends
    per_parameter = recipe.weight + recipe.master
    return analysis.trained_parameters * per_parameter + matrices * states.matrices + ends * states.others


def data_rate(analysis: Analysis) -> float:
    """Bytes of token ids that the run reads per second at its predicted step time."""
    return analysis.tokens_per_second * TOKEN_BYTES


def storage_costs(analysis: Analysis) -> list[StorageCost]:
    """Every storage level of the cluster; shared levels are read by all, local ones by each node its part."""
    costs = []
    size = checkpoint_bytes(analysis)
    for storage in analysis.job.cluster.storage:
        bandwidth = storage.bandwidth(analysis.job.cluster.nodes)
        seconds = size / bandwidth + storage.link.latency
        costs.append(StorageCost(storage.name, bandwidth, seconds, seconds, data_rate(analysis) / bandwidth))
    return costs


def checkpoint_level(analysis: Analysis) -> StorageCost | None:
    """Where checkpoints go: the fastest level that outlives a node; its own disks only where there is no other."""
    costs = storage_costs(analysis)
    shared = [cost for cost, storage in zip(costs, analysis.job.cluster.storage) if storage.shared]
    return min(shared or costs, key=lambda cost: cost.write_seconds, default=None)
