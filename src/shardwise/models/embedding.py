"""The embedding of tokens, whose gradient on a GPU is one pass over the gradients of the tokens.

PyTorch's own takes several passes, each several times as long, and rounds every sum more than once. Where gradients are
accumulated in fp32, ours is computed in fp32: a rounded gradient would have to be widened into a second tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` with that gradient."""

    def forward(self, input: Tensor) -> Tensor:
        if not kernels.run_on(input.device) or torch.compiler.is_compiling():
            return super().forward(input)
        rows: Tensor = _LookedUp.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        ctx.dtype = (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, summed_rows(gradient.flatten(0, -2), tokens.flatten(), ctx.rows, ctx.dtype)


def summed_rows(gradient: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """For each token of the vocabulary the sum of its rows of ``gradient`` [tokens, features], rounded at most once."""
    from shardwise.models.kernels.embedding_kernel import FEATURES, ROWS, WARPS, row_sums

    ordered, order = tokens.sort(stable=True)
    sums = torch.zeros((vocabulary, gradient.shape[1]), dtype=dtype, device=gradient.device)
    features = gradient.shape[1]
    row_sums[(len(tokens), -(-features // FEATURES))](
        gradient.contiguous(), ordered, order, sums, len(tokens), features, ROWS, FEATURES, num_warps=WARPS
    )
    return sums
