"""How tokens get to their experts and back; the default only sorts them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """What a `MixtureOfExperts` asks of its ``exchange``; the handle is the exchange's own business."""

    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Of ``rows`` [tokens, hidden] going to ``indices`` [tokens, k]: rows by expert, counts [experts], handle."""

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """The experts' rows back at their tokens [tokens, hidden], weighted by ``weights`` [tokens, k] and summed."""


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
        handle = (order, back)
        spread: Tensor = _Spread.apply(rows, *handle, indices.shape[1])  # type: ignore[no-untyped-call]
        return spread, count_tokens(experts[None], self.experts)[0], handle

    def combine(self, rows: Tensor, weights: Tensor, handle: tuple[Tensor, Tensor]) -> Tensor:
        order, back = handle
        returned: Tensor = _Reorder.apply(rows, back, order)  # type: ignore[no-untyped-call]
        returned = torch.unflatten(returned, 0, weights.shape)
        return torch.bmm(weights.to(rows.dtype)[:, None, :], returned)[:, 0]


def count_tokens(indices: Tensor, experts: int) -> Tensor:
    """How often each expert occurs in each row of ``indices`` [rows, any]: [rows, experts] int64."""
    counts = torch.zeros(indices.shape[0], experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(1, indices, torch.ones_like(indices))


class _Spread(torch.autograd.Function):
    """Each row ``copies`` times over, in the given order; ``back`` is the inverse of that order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return torch.unflatten(gradient.index_select(0, back), 0, (-1, ctx.copies)).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """The rows in the given order; ``back`` is its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
