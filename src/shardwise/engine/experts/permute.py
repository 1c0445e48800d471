"""Rows copied to where they are needed, and the copies summed again: gathers only, forward and backward.

No sum depends on the order of atomic additions, and the host reads nothing. One `Copies` serves `spread`, `collect` and
both backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """Which rows are copied where, and which copies each row has."""

    source: Tensor
    """[copies]: the row that each copy is made of."""
    listed: Tensor
    """[copies]: the same copies, row by row."""
    starts: Tensor
    """[rows]: where in `listed` the copies of each row begin."""
    each: int | None = None
    """Copies of every row, if all rows have the same number."""


def sorted_copies(keys: Tensor) -> Copies:
    """One copy of row r for each of ``keys[r]`` [rows, k], in the order of the keys; row by row in that of k."""
    rows, each = keys.shape
    order = keys.flatten().argsort(stable=True)
    return Copies(order // each, inverse(order), torch.arange(rows, device=keys.device) * each, each)


def some_sorted_copies(keys: Tensor, wanted: Tensor, total: int) -> tuple[Copies, Tensor]:
    """`sorted_copies` of only the ``total`` keys that ``wanted`` [rows, k] marks, and the flat indices of these."""
    order = keys.masked_fill(~wanted, torch.iinfo(keys.dtype).max).flatten().argsort(stable=True)
    marked = torch.nonzero_static(wanted.flatten(), size=total)[:, 0]
    each = wanted.sum(1)
    listed = inverse(order).index_select(0, marked)
    return Copies(order[:total] // keys.shape[1], listed, each.cumsum(0) - each), marked


def masked_copies(mask: Tensor, total: int) -> Copies:
    """A copy of row r for every column that ``mask`` [rows, columns] marks, column by column, ``total`` of them."""
    source = torch.nonzero_static(mask.T.contiguous(), size=total)[:, 1]
    places = mask.T.flatten().cumsum(0).view(mask.shape[1], -1).T.flatten() - 1
    marked = torch.nonzero_static(mask.flatten(), size=total)[:, 0]
    each = mask.sum(1)
    return Copies(source.contiguous(), places.index_select(0, marked), each.cumsum(0) - each)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def spread(rows: Tensor, copies: Copies) -> Tensor:
    """[rows, width] to [copies, width]."""
    result: Tensor = _Spread.apply(rows, copies)  # type: ignore[no-untyped-call]
    return result


def collect(rows: Tensor, copies: Copies, weights: Tensor | None = None) -> Tensor:
    """[copies, width] to [rows, width]: the sum of each row's copies, times ``weights`` [copies] in listed order."""
    if weights is not None:
        weights = weights.to(rows.dtype)
    result: Tensor = _Collect.apply(rows, weights, copies)  # type: ignore[no-untyped-call]
    return result


def _summed(rows: Tensor, listed: Tensor, starts: Tensor, each: int | None, weights: Tensor | None = None) -> Tensor:
    if each is None:
        # A bag holds one row's copies: PyTorch's kernel adds in fp32 and writes only the sum.
        return F.embedding_bag(listed, rows.contiguous(), starts, mode="sum", per_sample_weights=weights)
    # Faster on a GPU than bags (H200, 8,192 x 8 rows of 2,048 bf16: 0.24 against 0.36 ms, weighted 0.40 against 0.49).
    apart = torch.unflatten(rows.index_select(0, listed), 0, (-1, each))
    return apart.sum(1) if weights is None else torch.bmm(weights.view(-1, 1, each), apart)[:, 0]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.listed, copies.starts)
        ctx.each = copies.each
        return rows.index_select(0, copies.source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        listed, starts = ctx.saved_tensors
        return _summed(gradient, listed, starts, ctx.each), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.source, *(() if weights is None else (copies.listed, weights, rows)))
        return _summed(rows, copies.listed, copies.starts, copies.each, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, *weighted = ctx.saved_tensors
        gradients = gradient.index_select(0, source)
        if not weighted:
            return gradients, None, None
        listed, weights, rows = weighted
        of_weights = torch.linalg.vecdot(gradients, rows).index_select(0, listed)
        by_copy = torch.empty_like(weights).scatter_(0, listed, weights)
        return gradients.mul_(by_copy[:, None]), of_weights, None
