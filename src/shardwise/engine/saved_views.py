"""What autograd saves in place of a tensor that is computed again or brought back: a view of a storage to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedView:
    """``content`` returns a tensor that begins where the storage does."""

    content: Callable[[], Tensor]
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
