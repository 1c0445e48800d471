"""Attention of a block within a sliding window, by the kernel that leaves out what the window hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.context.kernels import Scores

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class WindowKernel:
    """FlashAttention for the tensors that `dot_product.takes`: a query sees so many keys ``before`` and ``behind``
    its own, and the own key of the last query is the last key.

    Windows are said to the operator under those of `scaled_dot_product_attention`.
    """

    before: int
    behind: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = aten._flash_attention_forward(
            query, key, value, None, None, query.shape[1], key.shape[1], 0.0, False, False, **self._said(scores)
        )
        return out, log_sum

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum: Tensor,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_random = torch.zeros(2, dtype=torch.uint64, device=query.device)
        lengths = None, None, query.shape[1], key.shape[1]
        of_query, of_key, of_value = aten._flash_attention_backward(
            gradient, query, key, value, out, log_sum, *lengths, 0.0, False, no_random, no_random, **self._said(scores)
        )
        return of_query, of_key, of_value

    def _said(self, scores: Scores) -> dict[str, Any]:
        return {"scale": scores.scale, "window_size_left": self.before, "window_size_right": self.behind}
