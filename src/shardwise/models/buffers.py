"""Modules whose own buffers stay in fp32, whatever the weights are cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class BuffersInFp32(nn.Module):
    """For running sums: bf16 cannot count beyond 256, nor move a bias of one by a thousandth."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._buffers[name] = buffer.float()
        return self
