"""Linear maps cut over the ranks; they keep their names, so that a module which uses them does not notice."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.parts import Part, note_part
from shardwise.engine.tensor.moves import reduce, scatter


def cut_columns(linear: nn.Linear, rank: int, size: int, groups: int = 0) -> None:
    """Keeps the outputs of one rank; what follows finds fewer of them.

    ``groups``: heads that the outputs are made of. Fewer heads than ranks are repeated: neighbours hold the same head,
    each sees the gradients of its own queries only, and these are summed over the neighbours.
    """
    repeats = repeats_of(groups, size)
    width = linear.out_features * repeats // size
    for name in ("weight", "bias"):
        if getattr(linear, name) is not None:
            keep_outputs(linear, name, rank, width, repeats)
    linear.out_features = width


def repeats_of(groups: int, size: int) -> int:
    """How many of ``size`` ranks hold the same of ``groups`` heads."""
    return size // groups if groups and groups < size else 1


def keep_outputs(module: nn.Module, name: str, rank: int, width: int, repeats: int) -> None:
    """Of a parameter whose first dimension runs over the outputs of all heads, ``width`` of them."""
    part = Part(tuple(getattr(module, name).shape), copies=repeats, partial="kv_copies" if repeats > 1 else None)
    start = rank // repeats * width
    keep(module, name, part.cut(0, start, start + width))


class RowLinear(nn.Module):
    """A linear map that holds the weights of its own inputs: products are summed over the ranks, then the bias added.

    Under sequence parallelism each rank adds the bias to its own tokens, so that the bias's gradient is partial.
    """

    def __init__(self, linear: nn.Linear, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        size = group.size()
        width = linear.in_features // size
        self.weight, self.bias = linear.weight, linear.bias
        keep(self, "weight", Part(tuple(linear.weight.shape)).cut(1, rank * width, (rank + 1) * width))
        if linear.bias is not None:
            part = Part(tuple(linear.bias.shape), copies=size, partial="tp" if sequence_parallel else None)
            note_part(self, "bias", part)
        self.group, self.join = group, scatter if sequence_parallel else reduce

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.join(F.linear(inputs, self.weight), self.group)
        return outputs if self.bias is None else outputs + self.bias


def keep(module: nn.Module, name: str, part: Part) -> None:
    """Replaces a whole parameter by its part, and writes down which."""
    whole = getattr(module, name)
    with torch.no_grad():
        local = part.of(whole.detach()).clone(memory_format=torch.contiguous_format)
    setattr(module, name, nn.Parameter(local, requires_grad=whole.requires_grad))
    note_part(module, name, part)
