"""Keeping the load of the experts even by a loss on each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def balance_value(scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """The loss of each sequence, without its coefficient: [batch].

    ``scores`` [batch, seq, experts] are of the tokens at hand, ``counts`` [batch, experts] how many tokens of the
    *whole* sequence chose each expert. Of a part of a sequence the value is that part's share, so the shares of
    all parts add up to the value of the whole. It is 1 for an even load and larger for any other.
    """
    chosen = counts.sum(-1, keepdim=True)
    frequency = counts * (counts.shape[-1] / chosen)
    tokens = chosen / top_k
    probability = (scores / scores.sum(-1, keepdim=True)).sum(1) / tokens
    return (frequency * probability).sum(-1)


def with_gradient_of(states: Tensor, loss: Tensor) -> Tensor:
    """``states`` itself, through which the backward pass also reaches ``loss``, with a gradient of one.

    A loss inside a layer thus needs no way out: it acts even where the layers and the loss lie far apart.
    """
    joined: Tensor = _Joined.apply(states, loss)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.shape, loss.dtype, loss.device)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.ones(shape, dtype=dtype, device=device)
