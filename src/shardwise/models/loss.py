"""Cross-entropy from hidden states without ever holding the logits of all tokens.

Logits are computed once, for a few tokens at a time, together with their gradients: at a vocabulary of 128k they would
otherwise be the largest tensor of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a token that does not count
LOGITS_AT_ONCE = 2**27  # half a GiB in fp32


def cross_entropy_sum(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    labels: Tensor,
    shares: Tensor | None = None,
    *,
    softcap: float | None = None,
) -> Tensor:
    """The sum of the cross-entropy over all labels that count, in fp32; each times its share, where they are given.

    ``hidden`` [..., features], ``labels`` [...] and ``shares`` agree in their leading dimensions. Logits are bounded to
    ``softcap``, where it is given.
    """
    return summed_loss(hidden, head_weight, head_bias, labels, shares, softcap, _entropy)


# Of the logits of some tokens (fp32 if they are capped) and their labels: the cross entropy of each, zero where it does
# not count, and a function that gives the gradient of each token's by its logits, whether it counts or not.
Entropy = Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], Tensor]]]


def summed_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shares: Tensor | None,
    softcap: float | None,
    entropy: Entropy,
) -> Tensor:
    """`cross_entropy_sum` by any ``entropy``."""
    shares = None if shares is None else shares.flatten()
    total: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, bias, labels.flatten(), shares, torch.is_grad_enabled(), softcap, entropy
    )
    return total


def _entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    scores = logits.log_softmax(-1, dtype=torch.float32)
    row = labels.clamp(min=0)[:, None]
    lost = -scores.gather(1, row)[:, 0].masked_fill(labels == IGNORED, 0.0)
    # The probabilities, less one at the label.
    return lost, lambda: scores.exp_().scatter_add_(1, row, torch.full_like(row, -1.0, dtype=torch.float32))


def softly_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits that never exceed ``softcap`` (Gemma 2, arXiv 2408.00118)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def cap_slopes(capped: Tensor, softcap: float | None) -> Tensor | None:
    """The derivative of `softly_capped`, from its result."""
    return None if softcap is None else 1 - (capped / softcap).square()


class _CrossEntropySum(torch.autograd.Function):
    """Gradients are computed in the forward pass, while the logits exist, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shares: Tensor | None,
        differentiated: bool,
        softcap: float | None,
        entropy: Entropy,
    ) -> Tensor:
        for_hidden, for_weight, for_bias = (wanted and differentiated for wanted in ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        # Summed over the parts in fp32: a bf16 sum of many parts would lose the small ones.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        tokens_at_once = max(1, LOGITS_AT_ONCE // weight.shape[0])
        for start in range(0, hidden.shape[0], tokens_at_once):
            part = slice(start, start + tokens_at_once)
            logits = F.linear(hidden[part], weight, bias)
            if softcap is not None:
                logits = softly_capped(logits.float(), softcap)
            slopes = cap_slopes(logits, softcap)
            lost, gradient_by_logits = entropy(logits, labels[part])
            del logits
            total += lost.sum() if shares is None else lost @ shares[part]
            if of_hidden is None and of_weight is None and of_bias is None:
                continue
            # What counts is masked on the narrow side of each matmul, not on the wide logits.
            of_logits, counts = gradient_by_logits(), labels[part] != IGNORED
            if shares is not None:
                counts = counts * shares[part]
            del gradient_by_logits  # it holds the largest tensors of the step: none stays beside those of the next part
            if slopes is not None:
                of_logits.mul_(slopes)
            if of_bias is not None:
                of_bias += of_logits.T @ counts.float()
            of_logits = of_logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[part]).mul_(counts[:, None])
            if of_weight is not None:
                add_product(of_weight, of_logits.T, (hidden[part] * counts[:, None]).to(hidden.dtype))
            del of_logits
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled_ones = (
            None if one is None else scaled(one, gradient, dtype) for one, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*scaled_ones, None, None, None, None, None)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in another format, with no copy in its own."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a matmul to an fp32 ``total``; on a GPU in one pass, without rounding it first."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right
