"""A root-mean-square norm over features that are cut over the ranks: the queries of all heads together (OLMo-2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.tensor.linear import keep_runs
from shardwise.engine.tensor.moves import copy, reduce
from shardwise.layout.sharding import kv_copies, part_held


class WideNorm(nn.Module):
    """Each rank norms its own features by the mean square of all: one number a token is summed over the ranks.

    Where ranks hold copies of a head (``groups`` are fewer than ranks), each counts for its share.
    """

    def __init__(self, norm: Any, rank: int, group: dist.ProcessGroup, groups: int) -> None:
        super().__init__()
        self.weight, self.group = norm.weight, group
        self.repeats, self.features = kv_copies(group.size(), groups), norm.weight.shape[0]
        self.epsilon: float = getattr(norm, "eps", None) or norm.variance_epsilon
        width = self.features * self.repeats // group.size()
        start = part_held(rank, self.repeats) * width
        keep_runs(self, "weight", 0, [(start, start + width)], self.repeats)

    def forward(self, states: Tensor) -> Tensor:
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        own = wide.square().sum(-1, keepdim=True)
        # Every rank's outputs depend on the sum, so that its gradient is a sum over the ranks as well.
        mean = copy(reduce(own, self.group), self.group) / (self.repeats * self.features)
        normed = wide * (mean + self.epsilon).rsqrt()
        weighted: Tensor = normed * self.weight
        return weighted.type_as(states)
