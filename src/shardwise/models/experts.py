"""The routed experts of a layer: how tokens reach them, and their stacked matrices, multiplied by grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.mlp import activation_of
from shardwise.spec.model import Model

Multiply = Callable[[Tensor, Tensor], Tensor]
Work = Callable[[Tensor, Multiply], Any]  # takes rows, and the function that multiplies rows by their experts


def at_once(counts: Tensor) -> Work:
    """All rows in one call."""
    return lambda rows, multiply: multiply(rows, counts)


class GroupedExperts(nn.Module):
    """Stacked experts: ``gate`` and ``up`` are [experts, hidden, ffn], ``down`` is [experts, ffn, hidden].

    No token is dropped: every expert gets as many rows as were routed to it.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        experts, hidden, width = model.moe.experts, model.hidden, model.moe.ffn
        self.activation = activation_of(model)
        self.gate = _matrix(experts, hidden, width) if model.gated else None
        self.up = _matrix(experts, hidden, width)
        self.down = _matrix(experts, width, hidden)
        biased = model.mlp_bias
        self.gate_bias = nn.Parameter(torch.zeros(experts, width)) if biased and model.gated else None
        self.up_bias = nn.Parameter(torch.zeros(experts, width)) if biased else None
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden)) if biased else None

    def forward(self, rows: Tensor, work: Work) -> Any:
        """The result of ``work``, which may call `multiply` several times: parameters are gathered once for all."""
        return work(rows, self.multiply)

    def multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's MLP on its own rows: ``rows`` [n, hidden] are sorted by expert, ``counts`` [experts] each."""
        ends = counts.cumsum(0).to(torch.int32)
        up = _product(rows, self.up, self.up_bias, ends)
        gate = () if self.gate is None else (_product(rows, self.gate, self.gate_bias, ends),)
        inner = self.activation(*gate, up)
        return _product(inner, self.down, self.down_bias, ends)


def _matrix(experts: int, inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, inputs, outputs).normal_(std=0.02))


def _product(rows: Tensor, matrices: Tensor, biases: Tensor | None, ends: Tensor) -> Tensor:
    """Each row times the matrix of its expert, plus bias; the rows of an expert stop at its entry of ``ends``."""
    product = grouped_product(rows, matrices, ends)
    if biases is None:
        return product
    places = torch.arange(rows.shape[0], device=rows.device)[:, None]
    passed = (places < ends).to(biases.dtype)
    owned = passed.diff(dim=1, prepend=torch.zeros_like(passed[:, :1]))
    # A matmul rather than a lookup: the gradient of a lookup is summed in no fixed order.
    return product + owned @ biases


# In bf16 the grouped matmul is torch's own, which the compiler knows. In other formats torch computes it but does not
# compile it, and its backward refuses a broadcast gradient, so a small operator of our own replaces it.


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``rows`` [n, inputs] times ``matrices`` [groups, inputs, outputs]; a group's rows stop at its entry of ``ends``.

    ``ends`` is int32 and stays on the device: the host need not know the sizes of the groups. Rows after the last end
    are undefined.
    """
    product: Tensor
    if rows.dtype == torch.bfloat16:
        product = _DenseGradient.apply(F.grouped_mm(rows, matrices, offs=ends))  # type: ignore[no-untyped-call]
    else:
        product = _product_in_any_format(rows, matrices, ends)
    return product


class _DenseGradient(torch.autograd.Function):
    """The identity, with a gradient that lies in memory as one block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


@torch.library.custom_op("shardwise::grouped_product", mutates_args=())
def _product_in_any_format(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


@_product_in_any_format.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[-1])


@torch.library.custom_op("shardwise::grouped_product_of_columns", mutates_args=())
def _product_of_columns(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """For each group its rows, transposed, times their gradient: [groups, inputs, outputs]."""
    return F.grouped_mm(rows.T, gradient, offs=ends)


@_product_of_columns.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_rows = _product_in_any_format(gradient, matrices.transpose(-1, -2), ends)
    return for_rows, _product_of_columns(rows, gradient, ends), None


_product_in_any_format.register_autograd(_backward, setup_context=save_inputs)


class TokenExchange(Protocol):
    """How tokens get to their experts and back; the handle is private to the exchange."""

    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Sends ``rows`` [tokens, hidden] to experts ``indices`` [tokens, k]; returns rows sorted by expert, counts
        [experts] and a handle."""

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """The experts' rows back at their tokens [tokens, hidden], weighted by ``weights`` [tokens, k] and summed."""


Beside = Callable[[], Tensor]
Mixed = tuple[Tensor, Tensor | None]


def mix_in_turn(
    exchange: TokenExchange, experts: GroupedExperts, rows: Tensor, indices: Tensor, weights: Tensor,
    beside: Beside | None,
) -> Mixed:  # fmt: skip
    """The weighted sum of each token's experts, and what ``beside`` (the shared expert) computes of the same tokens."""
    sorted_rows, counts, handle = exchange.dispatch(rows, indices)
    mixed = exchange.combine(experts(sorted_rows, at_once(counts)), weights, handle)
    return mixed, None if beside is None else beside()


class LocalExchange:
    """All experts are here: a token's row is copied once for each of its experts and sorted by expert.

    Everything moves by gathers, forward and backward, so that no sum depends on the order of atomic additions.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        experts = indices.flatten()
        order = experts.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        each = indices.shape[1]
        spread: Tensor = _CopiedRows.apply(rows, order // each, back, each)  # type: ignore[no-untyped-call]
        return spread, count_tokens(experts[None], self.experts)[0], (order, back)

    def combine(self, rows: Tensor, weights: Tensor, handle: tuple[Tensor, Tensor]) -> Tensor:
        combined: Tensor = _WeightedRows.apply(rows, weights.to(rows.dtype), *handle)  # type: ignore[no-untyped-call]
        return combined


def count_tokens(indices: Tensor, experts: int) -> Tensor:
    """How often each expert occurs in each row of ``indices`` [rows, any]: [rows, experts] int64."""
    counts = torch.zeros(indices.shape[0], experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(1, indices, torch.ones_like(indices))


def reorder_rows(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Row i of the result is row ``order[i]``; ``back`` is the inverse of that order. Backward is a gather too."""
    result: Tensor = _CopiedRows.apply(rows, order, back, 1)  # type: ignore[no-untyped-call]
    return result


class _CopiedRows(torch.autograd.Function):
    """Row i of the result is row ``source[i]``; each row has ``copies``, which ``back`` lists row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        of_copies = gradient.index_select(0, back)
        of_rows = of_copies if ctx.copies == 1 else torch.unflatten(of_copies, 0, (-1, ctx.copies)).sum(1)
        return of_rows, None, None, None


class _WeightedRows(torch.autograd.Function):
    """The sum of each token's rows, weighted by ``weights`` [tokens, k]; ``order`` and ``back`` are the handle.

    The backward pass works on rows sorted by expert: a batched matmul of the few rows of each token takes ten times as
    long as reading them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, back)
        returned = torch.unflatten(rows.index_select(0, back), 0, weights.shape)
        if torch.compiler.is_compiling():  # which makes one pass of it, without rounding in between
            return (returned * weights[..., None]).sum(1)
        return torch.bmm(weights[:, None, :], returned)[:, 0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, back = ctx.saved_tensors
        spread = gradient.index_select(0, order // weights.shape[1])
        of_weights = (spread * rows).sum(-1, dtype=torch.float32).index_select(0, back)
        of_rows = spread.mul_(weights.flatten().index_select(0, order)[:, None])
        return of_rows, of_weights.view_as(weights).to(weights.dtype), None, None
