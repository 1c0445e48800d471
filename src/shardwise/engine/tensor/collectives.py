"""The collectives of tensor parallelism, each with that of its gradient.

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

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.autograd import same, with_gradient
from shardwise.engine.collectives.reductions import Pending, all_gather, all_reduce_sum, reduce_scatter_sum
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent, wait_for

SEQUENCE = 1  # of [batch, sequence, features]


def copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(tensor, same, lambda gradient: _summed(gradient, group))


def reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(tensor, lambda partial: _summed(partial, group), same)


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(
        tensor, lambda part: start_gather(part, group).wait(), lambda gradient: start_scatter(gradient, group).wait()
    )


def scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(
        tensor, lambda partial: start_scatter(partial, group).wait(), lambda part: start_gather(part, group).wait()
    )


def join(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return with_gradient(
        tensor,
        lambda part: start_gather(part, group, part.dim() - 1).wait(),
        lambda gradient: gradient.chunk(group.size(), -1)[group.rank()],
    )


def narrow_move(group: dist.ProcessGroup, sequence_parallel: bool) -> Callable[..., tuple[Tensor, ...]]:
    """For narrow vectors, cheap to keep whole, that the heads of all ranks read: one collective for all of them."""
    move = gather if sequence_parallel else copy

    def moved(*narrow: Tensor) -> tuple[Tensor, ...]:
        return move(torch.cat(narrow, -1), group).split_with_sizes([tensor.shape[-1] for tensor in narrow], -1)

    return moved


class CollectiveInFlight:
    """A collective in flight; ``wait`` returns ``result()``. ``source`` stays allocated until then."""

    def __init__(self, what: str, work: Pending | None, source: Tensor, result: Callable[[], Tensor]) -> None:
        self.what, self.work, self.source, self.result = what, work, source, result

    def wait(self) -> Tensor:
        wait_for(self.work, "tp", self.what)
        return self.result()


def start_sum(tensor: Tensor, group: dist.ProcessGroup) -> CollectiveInFlight:
    """An all-reduce in place."""
    with sent("tp", Called.ALL_REDUCE, tensor):
        work = all_reduce_sum(tensor, group, async_op=True)
    return CollectiveInFlight(Called.ALL_REDUCE, work, tensor, lambda: tensor)


def start_gather(tensor: Tensor, group: dist.ProcessGroup, dimension: int = SEQUENCE) -> CollectiveInFlight:
    """The parts of all ranks, concatenated along ``dimension``."""
    tensor = tensor.contiguous()
    stacked = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    with sent("tp", Called.ALL_GATHER, tensor):
        work = all_gather(stacked, tensor, group, async_op=True)

    def whole() -> Tensor:
        apart = torch.unflatten(stacked, 0, (group.size(), -1)).movedim(0, dimension)
        return apart.flatten(dimension, dimension + 1)

    return CollectiveInFlight(Called.ALL_GATHER, work, tensor, whole)


def start_scatter(tensor: Tensor, group: dist.ProcessGroup) -> CollectiveInFlight:
    """The sum over all ranks, of which each keeps its part of the sequence."""
    parts = torch.unflatten(tensor, SEQUENCE, (group.size(), -1)).movedim(SEQUENCE, 0).flatten(0, 1).contiguous()
    mine = tensor.new_empty((tensor.shape[0], tensor.shape[SEQUENCE] // group.size(), *tensor.shape[2:]))
    with sent("tp", Called.REDUCE_SCATTER, parts):
        work = reduce_scatter_sum(mine, parts, group, async_op=True)
    return CollectiveInFlight(Called.REDUCE_SCATTER, work, parts, lambda: mine)


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return start_sum(tensor.clone(memory_format=torch.contiguous_format), group).wait()
