"""Column-parallel matmuls of one region: hidden states gathered for the matmuls, saved only in part.

What is saved for the backward pass is each rank's own part of the sequence; the rest is gathered once more while the
input gradients are computed, and these are summed while the weight gradients are (Korthikanti et al. 2022, section
4.2.2; the order is Megatron-LM's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.tensor.moves import SequenceGather, SequenceScatter, Sum
from shardwise.engine.weight_gradients import are_put_off, later, may_be_put_off

Project = Callable[..., tuple[Tensor, ...]]


def column_products(group: dist.ProcessGroup, sequence_parallel: bool) -> Project:
    """What stands for `project_each` in a region that is cut over ``group``."""

    def project(hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        tensors = [tensor for one in maps for tensor in (one.weight, one.bias)]
        outputs: tuple[Tensor, ...] = _Products.apply(hidden, group, sequence_parallel, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    return project


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel, ctx.deferrable = group, sequence_parallel, may_be_put_off()
        ctx.weights, ctx.biases = tensors[::2], tensors[1::2]
        ctx.save_for_backward(hidden)
        whole = SequenceGather(hidden, group).wait() if sequence_parallel else hidden
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(ctx.weights, ctx.biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), group = ctx.saved_tensors, ctx.group
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        waits = ctx.deferrable and are_put_off()
        early = SequenceGather(hidden, group) if ctx.sequence_parallel and not waits else None
        pending = None
        if ctx.needs_input_grad[0]:
            of_whole = torch.unflatten(sum_of_products(flat, ctx.weights), 0, gradients[0].shape[:-1])
            pending = SequenceScatter(of_whole, group) if ctx.sequence_parallel else Sum(of_whole, group)

        def of_weights() -> list[Tensor]:
            gather = early or (SequenceGather(hidden, group) if ctx.sequence_parallel else None)
            whole = (gather.wait() if gather else hidden).flatten(0, -2)
            return [gradient.T @ whole for gradient in flat]

        weight_gradients = later(of_weights, *ctx.weights) if waits else of_weights()
        bias_gradients = [None if bias is None else one.sum(0) for bias, one in zip(ctx.biases, flat)]
        of_maps = [one for pair in zip(weight_gradients, bias_gradients) for one in pair]
        return (pending.wait() if pending else None, None, None, *of_maps)


def sum_of_products(gradients: list[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    """The gradient of the common input [tokens, features], added up in place of separate tensors."""
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:]):
        total.addmm_(gradient, weight)
    return total
