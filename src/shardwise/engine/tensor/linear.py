"""Linear layers cut over the ranks, several of them in one region, and a norm over features that are cut.

Their collectives, each with that of its gradient:

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

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.autograd import defer, is_deferring, may_defer, same, with_gradient
from shardwise.engine.collectives.communicator import RingMessages
from shardwise.engine.collectives.reductions import Pending, all_gather, all_reduce_sum, reduce_scatter_sum
from shardwise.engine.labels import Called
from shardwise.engine.parameters import HeldPart, keep, note_part
from shardwise.engine.profiler_ranges import sent, wait_for
from shardwise.layout.pieces import gathered_parts, scattered_parts
from shardwise.layout.sharding import kv_copies, part_held
from shardwise.models.adapters import Adapter, adapter_of, with_adapters
from shardwise.models.mlp import sum_of_matmuls
from shardwise.models.stored import StoredWeight, stored_product

# -- The collectives -------------------------------------------------------------------------------

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


# -- Layers cut by column or row -------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    """Also Hugging Face's ``Conv1D``, a linear layer whose weight is [inputs, outputs]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def sizes(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    outputs, inputs = linear.weight.shape if isinstance(linear, nn.Linear) else linear.weight.shape[::-1]
    return inputs, outputs


def cut_columns(linear: nn.Module, rank: int, size: int, groups: int = 0) -> None:
    """Keeps the outputs of one rank.

    ``groups`` is the number of heads in the outputs. If there are fewer heads than ranks, neighbouring ranks hold the
    same head; each sees the gradients of its own queries only, and these are summed over the neighbours.
    """
    repeats = kv_copies(size, groups)
    width = sizes(linear)[1] * repeats // size
    start = part_held(rank, repeats) * width
    _keep_outputs(linear, [(start, start + width)], repeats)


def cut_fused(linear: nn.Module, rank: int, size: int, shares: Sequence[int]) -> None:
    """`cut_columns` of several layers fused in one; ``shares`` are their widths relative to each other."""
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
    adapter = adapter_of(linear)
    if adapter is not None:
        keep_runs(adapter, "b", 0, runs, repeats)
        if adapter.magnitude is not None:
            keep_runs(adapter, "magnitude", 0, runs, repeats)


def keep_runs(module: nn.Module, name: str, dimension: int, runs: Sequence[tuple[int, int]], repeats: int) -> None:
    """Keeps these runs of the dimension of a parameter that counts outputs."""
    part = HeldPart(tuple(getattr(module, name).shape), copies=repeats, partial="kv_copies" if repeats > 1 else None)
    keep(module, name, part.take(dimension, runs))


class RowLinear(nn.Module):
    """A row-parallel linear layer: outputs are summed over the ranks, then the bias is added.

    Under sequence parallelism each rank adds the bias to its own tokens, so that the bias's gradient is partial.
    ``multiply`` may be replaced by another matmul of inputs and weight. With ``overlap`` each part of the sequence is
    multiplied while the one before it is summed over the ranks.
    """

    def __init__(
        self, linear: Any, rank: int, group: dist.ProcessGroup, sequence_parallel: bool, overlap: bool = False
    ) -> None:
        super().__init__()
        size = group.size()
        width = sizes(linear)[0] // size
        self.weight, self.bias = linear.weight, linear.bias
        self.stored: StoredWeight | None = None  # the weight in fewer bits, instead
        self.transposed = not isinstance(linear, nn.Linear)
        inputs = 0 if self.transposed else 1
        keep(self, "weight", HeldPart(tuple(linear.weight.shape)).cut(inputs, rank * width, (rank + 1) * width))
        if linear.bias is not None:
            part = HeldPart(tuple(linear.bias.shape), copies=size, partial="tp" if sequence_parallel else None)
            note_part(self, "bias", part)
        self.group, self.join = group, scatter if sequence_parallel else reduce
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.overlap = overlap and sequence_parallel
        self.adapter = adapter_of(linear)
        if self.adapter is not None:
            _cut_inputs(self.adapter, rank, group, sequence_parallel)

    def forward(self, inputs: Tensor) -> Tensor:
        stored, adapter = self.stored, adapter_of(self)
        weight: Any = stored or (self.weight.T if self.transposed else self.weight)
        if self.overlap:
            outputs: Tensor = _ScatteredProduct.apply(inputs, weight, self.group)  # type: ignore[no-untyped-call]
            if adapter is not None:
                outputs = adapter.widened(outputs, self.join(adapter.narrow(inputs), self.group))
        else:
            outputs = self.multiply(inputs, weight) if stored is None else stored_product(inputs, stored)
            if adapter is not None:  # a share of its sum over the inputs, too
                outputs = adapter.widened(outputs, adapter.narrow(inputs))
            outputs = self.join(outputs, self.group)
        if adapter is not None:
            outputs = adapter.lengthened(outputs, self)
        return outputs if self.bias is None else outputs + self.bias


def _cut_inputs(adapter: Adapter, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    """Cuts an adapter as `RowLinear` cuts its weight; each rank sees a share of the sums that ``b`` widens."""
    size, whole = group.size(), tuple(adapter.a.shape)
    width = whole[1] // size
    keep(adapter, "a", HeldPart(whole).cut(1, rank * width, (rank + 1) * width))
    if adapter.dropout is not None:
        adapter.dropout.first_feature = rank * width
    note_part(adapter, "b", HeldPart(tuple(adapter.b.shape), copies=size, partial="tp"))
    if adapter.magnitude is not None:
        part = HeldPart(tuple(adapter.magnitude.shape), copies=size, partial="tp" if sequence_parallel else None)
        note_part(adapter, "magnitude", part)
    adapter.over_inputs = lambda squares: _summed(squares, group)


Project = Callable[..., tuple[Tensor, ...]]


def dense(weight: Tensor | StoredWeight, dtype: torch.dtype) -> Tensor:
    """A weight, made for this use where only its codes are kept."""
    return weight.dense(dtype) if isinstance(weight, StoredWeight) else weight


def column_matmuls(group: dist.ProcessGroup, sequence_parallel: bool, overlap: bool = False) -> Project:
    """Replaces `project_each` in a region that is cut over ``group``.

    ``overlap``: each part of the hidden states is multiplied while the next is gathered.
    """

    def project(hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        adapted = any(adapter_of(linear) is not None for linear in maps)
        weights = [getattr(linear, "stored", None) or linear.weight for linear in maps]
        biases = [None if adapted else linear.bias for linear in maps]
        tensors = [each for pair in zip(weights, biases) for each in pair]
        outputs: tuple[Tensor, ...] = _ColumnMatmuls.apply(hidden, group, sequence_parallel, overlap, *tensors)  # type: ignore[no-untyped-call]
        return with_adapters(outputs, hidden, maps, narrow_move(group, sequence_parallel)) if adapted else outputs

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
        ctx.weights, ctx.biases, ctx.trained = tensors[::2], tensors[1::2], ctx.needs_input_grad[4::2]
        ctx.save_for_backward(*((hidden,) if any(ctx.trained) else ()))  # only weight gradients read it
        weights = [dense(weight, hidden.dtype) for weight in ctx.weights]
        if overlap and sequence_parallel:
            return products_of_gathered(hidden, group, weights, ctx.biases)
        whole = start_gather(hidden, group).wait() if sequence_parallel else hidden
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, ctx.biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, weights = ctx.group, list(compress(ctx.weights, ctx.trained))
        hidden: Any = ctx.saved_tensors[0] if weights else None
        flat = [gradient.flatten(0, -2) for gradient in gradients]
        waits = ctx.deferrable and is_deferring()
        early = start_gather(hidden, group) if weights and ctx.sequence_parallel and not waits else None
        pending = None
        if ctx.needs_input_grad[0]:
            every = [dense(weight, flat[0].dtype) for weight in ctx.weights]
            of_whole = torch.unflatten(sum_of_matmuls(flat, every), 0, gradients[0].shape[:-1])
            start = start_scatter if ctx.sequence_parallel else start_sum
            pending = start(of_whole, group)

        def of_weights() -> list[Tensor]:
            gather = early or (start_gather(hidden, group) if ctx.sequence_parallel else None)
            whole = (gather.wait() if gather else hidden).flatten(0, -2)
            return [gradient.T @ whole for gradient in compress(flat, ctx.trained)]

        found = iter((defer(of_weights, *weights) if waits else of_weights()) if weights else ())
        weight_gradients = [next(found) if trained else None for trained in ctx.trained]
        bias_gradients = [
            gradient.sum(0) if needed else None for needed, gradient in zip(ctx.needs_input_grad[5::2], flat)
        ]
        of_maps = [gradient for pair in zip(weight_gradients, bias_gradients) for gradient in pair]
        return (pending.wait() if pending else None, None, None, None, *of_maps)


class WideNorm(nn.Module):
    """An RMS norm over features that are cut over the ranks, such as the queries of all heads together (OLMo-2).

    Each rank norms its own features by the mean square of all features: one number per token is summed over the ranks.
    Where several ranks hold copies of a head (fewer ``groups`` than ranks), each copy counts for its share.
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
        # The outputs of every rank depend on the sum, so its gradient is a sum over the ranks too.
        mean = copy(reduce(own, self.group), self.group) / (self.repeats * self.features)
        normed = wide * (mean + self.epsilon).rsqrt()
        weighted: Tensor = normed * self.weight
        return weighted.type_as(states)


# -- Matmuls overlapped with their own communication (``overlap.tp``), part by part as in `collectives.decomposed` ----
# While one part of the sequence is multiplied, the next is on its way around the ring: on NCCL's stream, or on gloo's
# threads. PyTorch's symmetric memory fuses the same (`torch.distributed._symmetric_memory`, "async TP"), but only on
# GPUs of one NVLink domain; it has not been tried here and is not used.


def arriving_parts(stacked: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields the parts of all ranks as they arrive in ``stacked`` [ranks, ...], which starts with this rank's own.

    While the caller works on one part, the next one arrives.
    """
    order, ring = gathered_parts(group.rank(), group.size()), RingMessages(group, "tp", Called.GATHERED_PARTS)
    for part, following in zip(order, (*order[1:], None)):
        if following is not None:
            ring.start(stacked[part], stacked[following])
        yield part, stacked[part]
        if following is not None:
            ring.wait()


def sum_onwards(product: Callable[[int], Tensor], group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of all ranks' ``product(part)``: each partial sum arrives during the next product."""
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


class _ScatteredProduct(torch.autograd.Function):
    """A row-parallel matmul: of the sum over the ranks, this rank's part of the sequence.

    The input gradient is computed part by part, as output gradients arrive; the weight gradient in one matmul.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor | StoredWeight, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.deferrable = group, may_defer() and isinstance(weight, nn.Parameter)
        ctx.weight = weight  # not saved: recompute restores another tensor, whose gradient is never read
        ctx.like = (inputs.shape, inputs.dtype, inputs.device)
        ctx.save_for_backward(*((inputs,) if ctx.needs_input_grad[1] else ()))
        length, matrix = inputs.shape[SEQUENCE] // group.size(), dense(weight, inputs.dtype)
        return sum_onwards(lambda part: F.linear(_part_of(inputs, part, length), matrix), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        group, weight, (shape, dtype, device) = ctx.group, ctx.weight, ctx.like
        length, stacked = gradient.shape[SEQUENCE], with_own(gradient, group)
        of_inputs = torch.empty(shape, dtype=dtype, device=device) if ctx.needs_input_grad[0] else None
        matrix = dense(weight, gradient.dtype) if ctx.needs_input_grad[0] else None
        for part, gradients in arriving_parts(stacked, group):
            if of_inputs is not None and matrix is not None:
                multiply_into(_part_of(of_inputs, part, length), gradients, matrix)

        if not ctx.needs_input_grad[1]:
            return of_inputs, None, None
        (inputs,) = ctx.saved_tensors

        def of_weight() -> tuple[Tensor]:
            whole = stacked.movedim(0, SEQUENCE).flatten(0, 2)
            return (whole.T @ inputs.flatten(0, -2),)

        (weight_gradient,) = defer(of_weight, weight) if ctx.deferrable and is_deferring() else of_weight()
        return of_inputs, weight_gradient, None


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
