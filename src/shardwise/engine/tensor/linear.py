"""Linear layers cut over the ranks, several of them in one region, and a norm over features that are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.parameters import HeldPart, keep, note_part
from shardwise.engine.tensor.collectives import copy, reduce, scatter, start_gather, start_scatter, start_sum
from shardwise.engine.tensor.decomposed import products_of_gathered, scattered_product
from shardwise.engine.weight_gradients import defer, is_deferring, may_defer
from shardwise.layout.sharding import kv_copies, part_held
from shardwise.models.mlp import sum_of_matmuls


def is_linear(module: nn.Module) -> bool:
    """Also Hugging Face's ``Conv1D``, a linear layer whose weight is [inputs, outputs]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def sizes(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    outputs, inputs = linear.weight.shape if isinstance(linear, nn.Linear) else linear.weight.shape[::-1]
    return inputs, outputs


def cut_columns(linear: nn.Module, rank: int, size: int, groups: int = 0) -> None:
    """Keeps the outputs of one rank.

    ``groups``: the number of heads in the outputs. Fewer heads than ranks are repeated: neighbours hold the same head,
    each sees the gradients of its own queries only, and these are summed over the neighbours.
    """
    repeats = kv_copies(size, groups)
    width = sizes(linear)[1] * repeats // size
    start = part_held(rank, repeats) * width
    _keep_outputs(linear, [(start, start + width)], repeats)


def cut_fused(linear: nn.Module, rank: int, size: int, shares: Sequence[int]) -> None:
    """The same for several layers fused in one; ``shares`` are their widths relative to each other."""
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
    """Keeps these runs of a parameter's dimension over the outputs of all heads."""
    part = HeldPart(tuple(getattr(module, name).shape), copies=repeats, partial="kv_copies" if repeats > 1 else None)
    keep(module, name, part.take(dimension, runs))


class RowLinear(nn.Module):
    """A linear layer that holds the weights of its own inputs: outputs are summed over the ranks, then the bias added.

    Under sequence parallelism each rank adds the bias to its own tokens, so that the bias's gradient is partial.
    ``multiply`` may be replaced by another matmul of inputs and weight. ``overlap``: part by part, each while the one
    before is summed over the ranks.
    """

    def __init__(
        self, linear: Any, rank: int, group: dist.ProcessGroup, sequence_parallel: bool, overlap: bool = False
    ) -> None:
        super().__init__()
        size = group.size()
        width = sizes(linear)[0] // size
        self.weight, self.bias = linear.weight, linear.bias
        self.transposed = not isinstance(linear, nn.Linear)
        inputs = 0 if self.transposed else 1
        keep(self, "weight", HeldPart(tuple(linear.weight.shape)).cut(inputs, rank * width, (rank + 1) * width))
        if linear.bias is not None:
            part = HeldPart(tuple(linear.bias.shape), copies=size, partial="tp" if sequence_parallel else None)
            note_part(self, "bias", part)
        self.group, self.join = group, scatter if sequence_parallel else reduce
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.overlap = overlap and sequence_parallel

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight.T if self.transposed else self.weight
        if self.overlap:
            outputs = scattered_product(inputs, weight, self.group)
        else:
            outputs = self.join(self.multiply(inputs, weight), self.group)
        return outputs if self.bias is None else outputs + self.bias


Project = Callable[..., tuple[Tensor, ...]]


def column_matmuls(group: dist.ProcessGroup, sequence_parallel: bool, overlap: bool = False) -> Project:
    """Replaces `project_each` in a region that is cut over ``group``.

    ``overlap``: each part of the hidden states is multiplied while the next is gathered.
    """

    def project(hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        tensors = [tensor for one in maps for tensor in (one.weight, one.bias)]
        outputs: tuple[Tensor, ...] = _ColumnMatmuls.apply(hidden, group, sequence_parallel, overlap, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    return project


class _ColumnMatmuls(torch.autograd.Function):
    """Column-parallel matmuls of one region, with the hidden states gathered for them.

    Each rank saves its own part of the sequence; the rest is gathered once more while the input gradients are
    computed, and these are summed while the weight gradients are (Korthikanti et al. 2022, section 4.2.2; the order is
    Megatron-LM's).
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        hidden, group, sequence_parallel, overlap, *tensors = given  # one parameter: see `models.mlp._Projected`
        ctx.group, ctx.sequence_parallel, ctx.deferrable = group, sequence_parallel, may_defer()
        ctx.weights, ctx.biases = tensors[::2], tensors[1::2]
        ctx.save_for_backward(hidden)
        if overlap and sequence_parallel:
            return products_of_gathered(hidden, group, ctx.weights, ctx.biases)
        whole = start_gather(hidden, group).wait() if sequence_parallel else hidden
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(ctx.weights, ctx.biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), group = ctx.saved_tensors, ctx.group
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        waits = ctx.deferrable and is_deferring()
        early = start_gather(hidden, group) if ctx.sequence_parallel and not waits else None
        pending = None
        if ctx.needs_input_grad[0]:
            of_whole = torch.unflatten(sum_of_matmuls(flat, ctx.weights), 0, gradients[0].shape[:-1])
            start = start_scatter if ctx.sequence_parallel else start_sum
            pending = start(of_whole, group)

        def of_weights() -> list[Tensor]:
            gather = early or (start_gather(hidden, group) if ctx.sequence_parallel else None)
            whole = (gather.wait() if gather else hidden).flatten(0, -2)
            return [gradient.T @ whole for gradient in flat]

        weight_gradients = defer(of_weights, *ctx.weights) if waits else of_weights()
        bias_gradients = [None if bias is None else one.sum(0) for bias, one in zip(ctx.biases, flat)]
        of_maps = [one for pair in zip(weight_gradients, bias_gradients) for one in pair]
        return (pending.wait() if pending else None, None, None, None, *of_maps)


class WideNorm(nn.Module):
    """A root-mean-square norm over features that are cut over the ranks: the queries of all heads together (OLMo-2).

    Each rank norms its own features by the mean square of all: one number per token is summed over the ranks.

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
