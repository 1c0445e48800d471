"""Cross-entropy from hidden states; logits are computed once, together with their gradients.

Many tokens are processed some at a time: with a vocabulary of 128k, the logits of all would be the largest tensor of
the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout.pieces import loss_tokens_at_once, padded_vocabulary
from shardwise.models.entropy import entropy_, scaled

IGNORED = -100  # the label of a token that does not count


def cross_entropy_sum(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    labels: Tensor,
    shares: Tensor | None = None,
    *,
    softcap: float | None = None,
) -> Tensor:
    """The sum of the cross-entropy over all labels that count, in fp32; each times its share, if ``shares`` are given.

    ``hidden`` [..., features], ``labels`` [...] and ``shares`` have the same leading dimensions. Logits are bounded by
    ``softcap``, if that is given.
    """
    return summed_loss(hidden, head_weight, head_bias, labels, shares, softcap, _entropy)


# Takes logits of some tokens, their labels (any label where the factor is 0), their factors, the bound of the logits,
# and whether to overwrite the logits by their gradients; returns the cross-entropy of each token times its factor.
Entropy = Callable[[Tensor, Tensor, Tensor, float | None, bool], Tensor]


def summed_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shares: Tensor | None,
    softcap: float | None,
    entropy: Entropy,
) -> Tensor:
    """`cross_entropy_sum` with any ``entropy``."""
    flat = labels.flatten()
    factors = (flat != IGNORED).float()
    if shares is not None:
        factors *= shares.flatten()
    total: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, bias, flat, factors, torch.is_grad_enabled(), softcap, entropy
    )
    return total


def _entropy(logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None, differentiated: bool) -> Tensor:
    return entropy_(logits, labels.clamp(min=0), factors, softcap, differentiated)


class _CrossEntropySum(torch.autograd.Function):
    """Gradients are computed in the forward pass, while the logits exist, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        factors: Tensor,
        differentiated: bool,
        softcap: float | None,
        entropy: Entropy,
    ) -> Tensor:
        for_hidden, for_weight, for_bias = wanted = [needed and differentiated for needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = hidden.dtype, _gradient_format(weight), None if bias is None else _gradient_format(bias)
        vocabulary, (weight, bias) = weight.shape[0], _in_whole_columns(weight, bias)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight: Tensor | None = None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        tokens_at_once = loss_tokens_at_once(len(hidden), *weight.shape)
        for start in range(0, hidden.shape[0], tokens_at_once):
            part = slice(start, start + tokens_at_once)
            logits = F.linear(hidden[part], weight, bias)
            total += entropy(logits[:, :vocabulary], labels[part], factors[part], softcap, any(wanted)).sum()
            # The logits are gradients now; in padding beyond the vocabulary both are zero.
            if of_bias is not None:
                of_bias += logits.sum(0, dtype=torch.float32)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            if for_weight and tokens_at_once >= len(hidden) and ctx.dtypes[1] == weight.dtype != torch.float16:
                of_weight = logits.T @ hidden
            elif for_weight:  # in fp32: a bf16 sum of many parts would lose the small ones, fp16 may be too narrow
                of_weight = plus_product(of_weight, logits.T, hidden[part])
            del logits  # the largest tensor of the step: it must not stay beside that of the next part
        parts = (None if gradient is None else gradient[:vocabulary] for gradient in (of_weight, of_bias))
        ctx.gradients = (
            of_hidden,
            *parts,
        )  # not saved for backward: a tensor that becomes a gradient must have no other owner
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the first backward pass of a loss takes its gradients: compute the loss again")
        kept, ctx.gradients = ctx.gradients, None
        gradients = (
            None if tensor is None else scaled(tensor, gradient, dtype) for tensor, dtype in zip(kept, ctx.dtypes)
        )
        return (*gradients, None, None, None, None, None)


def _gradient_format(weight: Tensor) -> torch.dtype:
    """The format in which a parameter accumulates its gradient."""
    wanted = weight.grad_dtype if weight.is_leaf else None
    return wanted or weight.dtype


def _in_whole_columns(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pads with rows of zeros on a GPU, where matmuls with an odd vocabulary are several times slower."""
    beyond = padded_vocabulary(weight.shape[0]) - weight.shape[0]
    if not (weight.is_cuda and beyond):
        return weight, bias
    return F.pad(weight, (0, 0, 0, beyond)), None if bias is None else F.pad(bias, (0, beyond))


def plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Adds a matmul to an fp32 ``total`` (None: zero) in place; on a GPU in one pass, without rounding the matmul."""
    if total is None:
        wide = left.is_cuda and left.dtype != torch.float32
        return torch.mm(left, right, out_dtype=torch.float32) if wide else (left @ right).float()
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(left @ right)
