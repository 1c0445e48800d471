"""Split matmuls beside their own communication (``overlap.tp``): part by part, as `collectives.decomposed` says.

While one part of the sequence is multiplied, the next is on its way around the ring: on NCCL's stream, or on gloo's
threads. PyTorch's symmetric memory fuses the same (`torch.distributed._symmetric_memory`, "async TP"), on GPUs of one
NVLink domain only; it has not been tried here and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.collectives.decomposed import gathered_parts, scattered_parts
from shardwise.engine.collectives.ring_messages import RingMessages
from shardwise.engine.labels import Called
from shardwise.engine.tensor.collectives import SEQUENCE
from shardwise.engine.weight_gradients import defer, is_deferring, may_defer


def arriving_parts(stacked: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """The parts of all ranks, as they come to be in ``stacked`` [ranks, ...], which has this rank's own.

    While the caller works on one, the next one arrives.
    """
    order, ring = gathered_parts(group.rank(), group.size()), RingMessages(group, "tp", Called.GATHERED_PARTS)
    for part, following in zip(order, (*order[1:], None)):
        if following is not None:
            ring.start(stacked[part], stacked[following])
        yield part, stacked[part]
        if following is not None:
            ring.wait()


def sum_onwards(product: Callable[[int], Tensor], group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of all ranks' ``product(part)``; the sum so far arrives while it is computed."""
    order, ring = scattered_parts(group.rank(), group.size()), RingMessages(group, "tp", Called.SUMMED_PARTS)
    total = product(order[0])
    for part in order[1:]:
        arriving = torch.empty_like(total)
        ring.start(total, arriving)
        total = product(part)
        ring.wait()
        total += arriving
    return total


def products_of_gathered(
    hidden: Tensor, group: dist.ProcessGroup, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Column-parallel matmuls of the hidden states of all ranks, of which ``hidden`` are this rank's."""
    batch, length = hidden.shape[0], hidden.shape[SEQUENCE]
    outputs = tuple(hidden.new_empty(batch, length * group.size(), weight.shape[0]) for weight in weights)
    for part, states in arriving_parts(with_own(hidden, group), group):
        for output, weight, bias in zip(outputs, weights, biases):
            multiply_into(_part_of(output, part, length), states, weight.T, bias)
    return outputs


def scattered_product(inputs: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row-parallel matmul: of the sum over the ranks, this rank's part of the sequence."""
    result: Tensor = _ScatteredProduct.apply(inputs, weight, group)  # type: ignore[no-untyped-call]
    return result


class _ScatteredProduct(torch.autograd.Function):
    """Gradients of the outputs are multiplied part by part for those of the inputs, and together for the weight's."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.deferrable = group, may_defer() and isinstance(weight, nn.Parameter)
        ctx.weight = weight  # not saved: recompute restores another tensor, whose gradient is never read
        ctx.save_for_backward(inputs)
        length = inputs.shape[SEQUENCE] // group.size()
        return sum_onwards(lambda part: F.linear(_part_of(inputs, part, length), weight), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (inputs,), group, weight = ctx.saved_tensors, ctx.group, ctx.weight
        length, stacked = gradient.shape[SEQUENCE], with_own(gradient, group)
        of_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        for part, gradients in arriving_parts(stacked, group):
            if of_inputs is not None:
                multiply_into(_part_of(of_inputs, part, length), gradients, weight)

        def of_weight() -> tuple[Tensor]:
            whole = stacked.movedim(0, SEQUENCE).flatten(0, 2)
            return (whole.T @ inputs.flatten(0, -2),)

        (found,) = defer(of_weight, weight) if ctx.deferrable and is_deferring() else of_weight()
        return of_inputs, found, None


def with_own(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Room for the parts of all ranks [ranks, ...], with this rank's own in it."""
    stacked = part.new_empty((group.size(), *part.shape))
    stacked[group.rank()] = part
    return stacked


def multiply_into(target: Tensor, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Writes ``rows`` times ``matrix`` (plus ``bias``) in place, without a copy where the target is one block."""
    if not target.is_contiguous():
        target.copy_(F.linear(rows, matrix.T, bias))
    elif bias is None:
        torch.mm(rows.flatten(0, -2), matrix, out=target.view(-1, target.shape[-1]))
    else:
        torch.addmm(bias, rows.flatten(0, -2), matrix, out=target.view(-1, target.shape[-1]))


def _part_of(whole: Tensor, part: int, length: int) -> Tensor:
    return whole.narrow(SEQUENCE, part * length, length)
