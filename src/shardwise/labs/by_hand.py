"""Tensor and sequence parallelism of an MLP by hand: Shoeybi et al. 2019, Korthikanti et al. 2022."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def gather(part: Tensor) -> Tensor:  # [batch, seq / n, features] of every rank -> [batch, seq, features]
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


def scatter(whole: Tensor) -> Tensor:  # the sum over the ranks, of which each keeps its part of the sequence
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(), 1)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


def reduce(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


class ColumnMatmul(torch.autograd.Function):  # each rank has some rows of the weight: some features of the output
    @staticmethod
    def forward(ctx, hidden, weight, sequence):  # type: ignore
        ctx.save_for_backward(hidden, weight)  # of the sequence only the own part: gathered again when it is needed
        ctx.sequence = sequence
        return F.linear(gather(hidden) if sequence else hidden, weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore
        hidden, weight = ctx.saved_tensors
        inputs = gather(hidden) if ctx.sequence else hidden
        of_inputs = (scatter if ctx.sequence else reduce)(gradient @ weight)
        return of_inputs, gradient.flatten(0, 1).T @ inputs.flatten(0, 1), None


class RowMatmul(torch.autograd.Function):  # each rank has some columns of the weight: a part of every sum
    @staticmethod
    def forward(ctx, inner, weight, sequence):  # type: ignore
        ctx.save_for_backward(inner, weight)
        ctx.sequence = sequence
        return (scatter if sequence else reduce)(F.linear(inner, weight))

    @staticmethod
    def backward(ctx, gradient):  # type: ignore
        inner, weight = ctx.saved_tensors
        whole = gather(gradient) if ctx.sequence else gradient
        return whole @ weight, whole.flatten(0, 1).T @ inner.flatten(0, 1), None
