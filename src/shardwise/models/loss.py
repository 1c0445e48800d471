"""Cross-entropy from hidden states without ever holding the logits of all tokens.

Logits are made for a few tokens at a time, in the forward and once more in the backward pass: at a vocabulary of
128k they would otherwise be the largest tensor of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a token that does not count
LOGITS_AT_ONCE = 2**27  # half a GiB in fp32


def cross_entropy_sum(hidden: Tensor, head_weight: Tensor, head_bias: Tensor | None, labels: Tensor) -> Tensor:
    """The sum of the cross-entropy over all labels that count, in fp32.

    ``hidden`` [..., features] and ``labels`` [...] agree in their leading dimensions.
    """
    total: Tensor = _CrossEntropySum.apply(hidden.flatten(0, -2), head_weight, head_bias, labels.flatten())  # type: ignore[no-untyped-call]
    return total


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden, weight):
            scores = F.linear(hidden[part], weight, bias).log_softmax(-1, dtype=torch.float32)
            right = scores.gather(1, labels[part].clamp(min=0)[:, None])[:, 0]
            total -= torch.where(labels[part] == IGNORED, 0.0, right).sum()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias, labels = ctx.saved_tensors
        for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        # Summed over the parts in fp32: a bf16 sum of many parts would lose the small ones.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        for part in _parts(hidden, weight):
            # What counts is masked and scaled on the narrow side of each product, not on the wide logits.
            counts = (labels[part] != IGNORED).float()[:, None]
            of_logits = _probabilities_less_one(hidden[part], weight, bias, labels[part])
            if of_bias is not None:
                of_bias += of_logits.T @ counts[:, 0]
            of_logits = of_logits.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[part] = (of_logits @ weight) * (counts * gradient)  # in fp32, then rounded once
            if of_weight is not None:
                _add_product(of_weight, of_logits.T, hidden[part] * counts.to(hidden.dtype))
        return (
            of_hidden,
            None if of_weight is None else of_weight.mul_(gradient).to(weight.dtype),
            None if of_bias is None else of_bias.mul_(gradient).to(bias.dtype),
            None,
        )


def _probabilities_less_one(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The gradient of one token's cross-entropy by its logits: the probabilities, less one at the label."""
    probabilities = F.linear(hidden, weight, bias).softmax(-1, dtype=torch.float32)
    minus_one = torch.full_like(labels, -1.0, dtype=torch.float32)[:, None]
    return probabilities.scatter_add_(1, labels.clamp(min=0)[:, None], minus_one)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product to an fp32 ``total``; on a GPU in one pass, without rounding the product first."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _parts(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    tokens = max(1, LOGITS_AT_ONCE // weight.shape[0])
    for start in range(0, hidden.shape[0], tokens):
        yield slice(start, start + tokens)
