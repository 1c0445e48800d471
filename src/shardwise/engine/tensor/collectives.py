"""The moves of tensor parallelism, each with the move that its gradient makes.

| forward | backward |
|---|---|
| copy: nothing | all-reduce |
| reduce: all-reduce | nothing |
| gather along the sequence | reduce-scatter |
| scatter: reduce-scatter along the sequence | gather |
| join the last dimension | own part: what follows is the same on every rank |

A column-parallel matmul needs nothing after it, a row-parallel one nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import all_gather, all_reduce_sum, reduce_scatter_sum
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent, waited

SEQUENCE = 1  # of [batch, sequence, features]


def copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return moved


def reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Reduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return moved


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _GatherHidden.apply(tensor, group)  # type: ignore[no-untyped-call]
    return moved


def scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Scatter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return moved


def join(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Join.apply(tensor, group)  # type: ignore[no-untyped-call]
    return moved


def narrow_move(group: dist.ProcessGroup, sequence_parallel: bool) -> Callable[..., tuple[Tensor, ...]]:
    """For vectors, narrow enough to be kept whole, that the heads of all ranks read: one move for all of them."""
    move = gather if sequence_parallel else copy

    def moved(*narrow: Tensor) -> tuple[Tensor, ...]:
        return move(torch.cat(narrow, -1), group).split_with_sizes([one.shape[-1] for one in narrow], -1)

    return moved


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scattered(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(tensor, group, tensor.dim() - 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Sum(tensor.clone(memory_format=torch.contiguous_format), group).wait()


def gathered(tensor: Tensor, group: dist.ProcessGroup, dimension: int = SEQUENCE) -> Tensor:
    """The parts of all ranks, one behind the other along ``dimension``."""
    return SequenceGather(tensor, group, dimension).wait()


def scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, of which each keeps its part of the sequence."""
    return SequenceScatter(tensor, group).wait()


class Sum:
    """An all-reduce under way; ``tensor`` is overwritten."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.tensor = tensor
        with sent("tp", Called.ALL_REDUCE, tensor):
            self.pending = all_reduce_sum(tensor, group, async_op=True)

    def wait(self) -> Tensor:
        if self.pending is not None:
            with waited("tp", Called.ALL_REDUCE):
                self.pending.wait()
        return self.tensor


class SequenceGather:
    """An all-gather under way."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, dimension: int = SEQUENCE) -> None:
        self.tensor, self.size, self.dimension = tensor.contiguous(), group.size(), dimension
        self.stacked = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with sent("tp", Called.ALL_GATHER, self.tensor):
            self.pending = all_gather(self.stacked, self.tensor, group, async_op=True)

    def wait(self) -> Tensor:
        if self.pending is not None:
            with waited("tp", Called.ALL_GATHER):
                self.pending.wait()
        if self.dimension == 0:
            return self.stacked
        apart = torch.unflatten(self.stacked, 0, (self.size, -1)).movedim(0, self.dimension)
        return apart.flatten(self.dimension, self.dimension + 1)


class SequenceScatter:
    """A reduce-scatter under way."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        apart = torch.unflatten(tensor, SEQUENCE, (group.size(), -1)).movedim(SEQUENCE, 0)
        self.parts = apart.flatten(0, 1).contiguous()
        self.mine = tensor.new_empty((tensor.shape[0], tensor.shape[SEQUENCE] // group.size(), *tensor.shape[2:]))
        with sent("tp", Called.REDUCE_SCATTER, self.parts):
            self.pending = reduce_scatter_sum(self.mine, self.parts, group, async_op=True)

    def wait(self) -> Tensor:
        if self.pending is not None:
            with waited("tp", Called.REDUCE_SCATTER):
                self.pending.wait()
        return self.mine
