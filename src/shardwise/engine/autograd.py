"""How our own parts enter the autograd graph: functions with a gradient function, views saved in place of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


# -- What autograd saves instead of a tensor that is recomputed or fetched later: a view of a storage to come ----------


@dataclass(frozen=True)
class SavedView:
    """A view whose storage is made when it is needed."""

    content: Callable[[], Tensor]  # returns a tensor that begins where the storage does
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    @classmethod
    def of(cls, tensor: Tensor, content: Callable[[], Tensor]) -> SavedView:
        return cls(content, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def unpack(saved: Tensor | SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.content().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
