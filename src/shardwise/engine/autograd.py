"""A function of one tensor with a gradient function of its own: how collectives enter the autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]


def with_gradient(tensor: Tensor, forward: Move, backward: Move) -> Tensor:
    """``forward(tensor)``, whose gradient with respect to ``tensor`` is ``backward`` of the output's gradient."""
    result: Tensor = _WithGradient.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return result


def same(tensor: Tensor) -> Tensor:
    """The tensor itself, as a view: a function's output must not be its input."""
    return tensor.view_as(tensor)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.gradient_of = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(gradient), None, None
