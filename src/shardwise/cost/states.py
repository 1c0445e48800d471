"""Weights, gradients and optimizer states of one device under ZeRO, hybrid sharding and offload.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): with N-way data parallelism stage 1 divides the
optimizer states by N, stage 2 the gradients too, stage 3 the parameters too. Activations are never divided.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.stages import RankContents
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.training import OPTIMIZERS, RECIPES


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on one device, and what offload moved to its host."""

    weights: float
    gradients: float
    optimizer: float
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __float__(self) -> float:
        return float(self.total)

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.offloaded + other.offloaded,
        )


def state_bytes(
    matrices: float,
    others: float = 0.0,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    zero: int = 0,
    shards: float = 1,
    gradients_sharded: bool | None = None,
    offload: Offload | None = None,
) -> StateBytes:
    """Bytes for ``matrices`` + ``others`` parameters whose states ZeRO divides over ``shards`` devices.

    ``others`` (embeddings, norms) are told apart only because Muon keeps other states for them.
    """
    recipe, states, offload = RECIPES[precision], OPTIMIZERS[optimizer], offload or Offload()
    parameters = matrices + others
    weights = parameters * (recipe.weight + recipe.copies) / (shards if zero >= 3 else 1)
    sharded = zero >= 2 if gradients_sharded is None else gradients_sharded
    gradients = parameters * recipe.gradient / (shards if sharded else 1)
    kept = parameters * recipe.master + matrices * states.matrices + others * states.others
    optimizer_bytes = kept / (shards if zero >= 1 else 1)
    offloaded = weights * offload.weights + gradients * offload.gradients + optimizer_bytes * offload.optimizer
    return StateBytes(
        weights * (1 - offload.weights),
        gradients * (1 - offload.gradients),
        optimizer_bytes * (1 - offload.optimizer),
        offloaded,
    )


def rank_state_bytes(contents: RankContents, strategy: Strategy, precision: str, optimizer: str) -> StateBytes:
    """States of one device of a pipeline rank: dense parts and experts have different sharding groups."""
    dense = state_bytes(
        contents.layer_matrices,
        contents.others,
        precision=precision,
        optimizer=optimizer,
        zero=strategy.zero,
        shards=strategy.sharding_group,
        gradients_sharded=strategy.gradients_sharded,
        offload=strategy.offload,
    )
    experts = state_bytes(
        contents.experts,
        precision=precision,
        optimizer=optimizer,
        zero=strategy.zero,
        shards=expert_shards(strategy),
        gradients_sharded=strategy.gradients_sharded,
        offload=strategy.offload,
    )
    return dense + experts


def expert_shards(strategy: Strategy) -> float:
    """Devices over which ZeRO divides expert states: expert data parallelism, cut like ``shard_group``."""
    share = strategy.sharding_group / strategy.gradient_group
    return max(1.0, strategy.expert_data_parallel * share)
