"""Loads of experts over all ranks: the balance loss of a whole sequence, the balancing bias, figures for users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.names import sent
from shardwise.models.moe import MoELayer
from shardwise.spec.strategy import Strategy

_TOTAL = "_shardwise_load"


@dataclass(frozen=True)
class LayerLoad:
    """How many tokens of the last step chose each expert of a layer, all ranks together; tensors where they were."""

    tokens: Tensor

    @property
    def imbalance(self) -> Tensor:
        """The largest load over the mean: 1 is even."""
        return self.tokens.max() / self.tokens.double().mean()


def sequence_sum(mesh: Mesh, strategy: Strategy) -> Callable[[Tensor], Tensor]:
    """What turns the counts [batch, experts] of a rank's tokens into those of whole sequences."""
    name = "sequence" if strategy.sequence_parallel else "cp"  # else tensor-parallel ranks hold the same tokens
    if mesh.size(name) == 1:
        return lambda counts: counts
    group = mesh.group(name)

    def summed(counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        with sent("ep", Called.SEQUENCE_LOADS, total):
            dist.all_reduce(total, group=group)
        return total

    return summed


@torch.no_grad()
def update_balance(module: nn.Module, mesh: Mesh, rate: float) -> None:
    """At the end of a step: the loads of all its tokens summed, every balancing bias moved by ``rate``, loads cleared.

    The same on every rank, since counts are added exactly. Nothing is read on the host.
    """
    mixtures = [one for one in module.modules() if isinstance(one, MoELayer)]
    if not mixtures:
        return
    totals = torch.stack([one.load for one in mixtures]).round().long()
    with sent("ep", Called.STEP_LOADS, totals):
        dist.all_reduce(totals, group=mesh.group("stage"))
    if not mesh.strategy.sequence_parallel:
        totals //= mesh.size("tp")  # each of these has counted the same tokens
    for mixture, total in zip(mixtures, totals):
        mixture.update_bias(total.float(), rate)
        mixture.__dict__[_TOTAL] = total


def expert_load(module: nn.Module) -> dict[str, LayerLoad]:
    """Loads of the last step that `update_balance` ended, by the name of the layer's mixture of experts."""
    return {
        name: LayerLoad(one.__dict__[_TOTAL])
        for name, one in module.named_modules()
        if isinstance(one, MoELayer) and _TOTAL in one.__dict__
    }
