"""Linear layers cut over the ranks; they keep their names, so that a module which uses them does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.parts import Part, note_part
from shardwise.engine.tensor.moves import reduce, scatter
from shardwise.layout.sharding import kv_copies, part_held


def is_linear(module: nn.Module) -> bool:
    """Also Hugging Face's ``Conv1D``, a linear layer whose weight is [inputs, outputs]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def sizes(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    outputs, inputs = linear.weight.shape if isinstance(linear, nn.Linear) else linear.weight.shape[::-1]
    return inputs, outputs


def cut_columns(linear: nn.Module, rank: int, size: int, groups: int = 0) -> None:
    """Keeps the outputs of one rank; what follows finds fewer of them.

    ``groups``: heads that the outputs are made of. Fewer heads than ranks are repeated: neighbours hold the same head,
    each sees the gradients of its own queries only, and these are summed over the neighbours.
    """
    repeats = kv_copies(size, groups)
    width = sizes(linear)[1] * repeats // size
    start = part_held(rank, repeats) * width
    _keep_outputs(linear, [(start, start + width)], repeats)


def cut_fused(linear: nn.Module, rank: int, size: int, shares: Sequence[int]) -> None:
    """The same of several maps in one: of each its own part; ``shares`` are their widths relative to each other."""
    unit, at, runs = sizes(linear)[1] // sum(shares), 0, []
    for share in shares:
        width = share * unit // size
        runs.append((at + rank * width, at + (rank + 1) * width))
        at += share * unit
    _keep_outputs(linear, runs, repeats=1)


def _keep_outputs(linear: Any, runs: Sequence[tuple[int, int]], repeats: int) -> None:
    plain = isinstance(linear, nn.Linear)
    keep_runs(linear, "weight", 0 if plain else 1, runs, repeats)
    if linear.bias is not None:
        keep_runs(linear, "bias", 0, runs, repeats)
    setattr(linear, "out_features" if plain else "nf", sum(stop - start for start, stop in runs))


def keep_runs(module: nn.Module, name: str, dimension: int, runs: Sequence[tuple[int, int]], repeats: int) -> None:
    """Of a parameter with a dimension that runs over the outputs of all heads, these."""
    part = Part(tuple(getattr(module, name).shape), copies=repeats, partial="kv_copies" if repeats > 1 else None)
    keep(module, name, part.take(dimension, runs))


class RowLinear(nn.Module):
    """A linear layer that holds the weights of its own inputs: products are summed over the ranks, then the bias added.

    Under sequence parallelism each rank adds the bias to its own tokens, so that the bias's gradient is partial.
    """

    def __init__(self, linear: Any, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        size = group.size()
        width = sizes(linear)[0] // size
        self.weight, self.bias = linear.weight, linear.bias
        self.transposed = not isinstance(linear, nn.Linear)
        inputs = 0 if self.transposed else 1
        keep(self, "weight", Part(tuple(linear.weight.shape)).cut(inputs, rank * width, (rank + 1) * width))
        if linear.bias is not None:
            part = Part(tuple(linear.bias.shape), copies=size, partial="tp" if sequence_parallel else None)
            note_part(self, "bias", part)
        self.group, self.join = group, scatter if sequence_parallel else reduce

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight.T if self.transposed else self.weight
        outputs = self.join(F.linear(inputs, weight), self.group)
        return outputs if self.bias is None else outputs + self.bias


def keep(module: nn.Module, name: str, part: Part) -> None:
    """Replaces a whole parameter by its part, and writes down which."""
    whole = getattr(module, name)
    with torch.no_grad():
        local = part.of(whole.detach()).clone(memory_format=torch.contiguous_format)
    setattr(module, name, nn.Parameter(local, requires_grad=whole.requires_grad))
    note_part(module, name, part)
