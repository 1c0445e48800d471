"""Cross-entropy from hidden states; logits are computed once, together with their gradients.

Many tokens are processed some at a time: with a vocabulary of 128k, the logits of all would be the largest tensor of
the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout.pieces import WIDE_LOGITS, loss_tokens_at_once, padded_vocabulary
from shardwise.models import kernels

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
    return summed_loss(hidden, head_weight, head_bias, labels, shares, softcap, entropy_)


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
        ctx.dtypes = hidden.dtype, gradient_format(weight), None if bias is None else gradient_format(bias)
        vocabulary, (weight, bias) = weight.shape[0], _in_whole_columns(weight, bias)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight: Tensor | None = None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        tokens_at_once = loss_tokens_at_once(len(hidden), *weight.shape, trains_head=ctx.needs_input_grad[1])
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
        # Not saved for backward: a tensor that becomes a gradient must have no other owner.
        ctx.gradients = (of_hidden, *parts)
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


def token_entropies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shares: Tensor | None,
    softcap: float | None,
    entropy: Entropy,
) -> Tensor:
    """The cross-entropy of each token in fp32 [tokens], zero where the label does not count; the head is frozen."""
    assert shares is None and not weight.requires_grad
    entropies: Tensor = _TokenEntropies.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, bias, labels.flatten(), torch.is_grad_enabled(), softcap, entropy
    )
    return entropies


class _TokenEntropies(torch.autograd.Function):
    """As `_CrossEntropySum`, but each token's gradient is scaled by itself in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, differentiated: bool,
        softcap: float | None, entropy: Entropy,
    ) -> Tensor:  # fmt: skip
        differentiated = differentiated and ctx.needs_input_grad[0]
        vocabulary, (weight, bias) = weight.shape[0], _in_whole_columns(weight, bias)
        factors = (labels != IGNORED).float()
        found = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if differentiated else None
        tokens_at_once = loss_tokens_at_once(len(hidden), *weight.shape, trains_head=False)
        for start in range(0, len(hidden), tokens_at_once):
            part = slice(start, start + tokens_at_once)
            logits = F.linear(hidden[part], weight, bias)
            found[part] = entropy(logits[:, :vocabulary], labels[part], factors[part], softcap, differentiated)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            del logits
        ctx.of_hidden = of_hidden
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.of_hidden = ctx.of_hidden, None
        scaled_rows = None if kept is None else (kept * gradient[:, None]).to(kept.dtype)
        return scaled_rows, None, None, None, None, None, None


def gradient_format(weight: Tensor) -> torch.dtype:
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


# -- From the logits of some tokens, which are overwritten by their gradients: one tensor serves both
# On a GPU a kernel does it in one pass. Elsewhere a few tokens at a time are computed in fp32, by the same formulas.


def softly_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits that never exceed ``softcap`` (Gemma 2, arXiv 2408.00118)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def entropy_(logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None, differentiated: bool) -> Tensor:
    """The cross-entropy of each token times its factor, in fp32, of logits [tokens, vocabulary].

    If ``differentiated``, the logits become their gradients.
    """
    labels = labels.clamp(min=0)
    lost = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if kernels.run_on(logits.device):
        run_whole(logits, labels, factors, lost, softcap, differentiated)
        return lost
    for part in _slices(logits):
        wide, row = _wide(logits[part], softcap), labels[part, None]
        scores = wide.log_softmax(-1, dtype=torch.float32)
        lost[part] = -scores.gather(1, row)[:, 0] * factors[part]
        if differentiated:  # the probabilities, less one at the label
            ones = torch.full_like(row, -1.0, dtype=torch.float32)
            gradient = scores.exp_().scatter_add_(1, row, ones).mul_(factors[part, None])
            logits[part] = _before_the_cap(gradient, wide, softcap)
    return lost


def statistics(logits: Tensor, columns: Tensor, present: int, softcap: float | None) -> Tensor:
    """What the loss needs of logits [tokens, columns] of a part of the vocabulary; ``present`` columns are not padding.

    fp32 [3, tokens]: the largest logit, the sum of exponentials relative to it, and the label's logit, which is 0 where
    the label's column is -1, because it is in another part.
    """
    sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
    if kernels.run_on(logits.device):
        run_statistics(logits, columns, sums, present, softcap)
        return sums
    sums[0] = torch.finfo(torch.float32).min  # of no columns at all
    for part in _slices(logits) if present else ():
        wide, column = _wide(logits[part, :present], softcap).float(), columns[part]
        sums[0, part] = wide.amax(-1)
        sums[2, part] = wide.gather(1, column.clamp(min=0)[:, None])[:, 0].where(column >= 0, 0.0)
        sums[1, part] = (wide - sums[0, part, None]).exp_().sum(-1)
    return sums


def differentiate_(
    logits: Tensor, columns: Tensor, factors: Tensor, largest: Tensor, total: Tensor, present: int,
    softcap: float | None,
) -> None:  # fmt: skip
    """Turns logits of a part into gradients, given the largest logit and the sum of exponentials over all parts."""
    if kernels.run_on(logits.device):
        run_differentiate(logits, columns, factors, largest, total, present, softcap)
        return
    logits[:, present:] = 0.0
    for part in _slices(logits) if present else ():
        wide, column = _wide(logits[part, :present], softcap).float(), columns[part]
        gradient = (wide - largest[part, None]).exp_().div_(total[part, None])
        gradient.scatter_add_(1, column.clamp(min=0)[:, None], -(column >= 0).to(gradient.dtype)[:, None])
        logits[part, :present] = _before_the_cap(gradient.mul_(factors[part, None]), wide, softcap)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product with a number: in place, or in another format without an intermediate copy."""
    if dtype == tensor.dtype:
        return tensor.mul_(factor)
    result = torch.empty_like(tensor, dtype=dtype)
    if not kernels.run_on(tensor.device):
        return torch.mul(tensor, factor, out=result)
    run_scaled(tensor, factor, result)
    return result


def _slices(logits: Tensor) -> Iterator[slice]:
    tokens = max(1, WIDE_LOGITS // logits.shape[1])
    return (slice(start, start + tokens) for start in range(0, len(logits), tokens))


def _wide(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softly_capped(logits.float(), softcap)


def _before_the_cap(gradient: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """The gradient of logits from the gradient of capped logits."""
    return gradient if softcap is None else gradient.mul_(1 - (capped / softcap).square())


# -- launches; also of tensors in host memory under Triton's interpreter ---------------------------------------


def run_whole(
    logits: Tensor, labels: Tensor, factors: Tensor, lost: Tensor, softcap: float | None, differentiated: bool
) -> None:
    from shardwise.models.triton_kernels import LOGITS_BLOCK, LOGITS_WARPS, whole

    tokens, columns = logits.shape
    whole[(tokens,)](
        logits, labels, factors, lost, logits.stride()[0], columns, softcap or 0.0, softcap is not None, differentiated,
        LOGITS_BLOCK, num_warps=LOGITS_WARPS,
    )  # fmt: skip


def run_statistics(logits: Tensor, columns: Tensor, sums: Tensor, present: int, softcap: float | None) -> None:
    from shardwise.models.triton_kernels import LOGITS_BLOCK, LOGITS_WARPS, statistics

    tokens = len(logits)
    statistics[(tokens,)](
        logits, columns, sums, tokens, logits.stride()[0], present, softcap or 0.0, softcap is not None, LOGITS_BLOCK,
        num_warps=LOGITS_WARPS,
    )  # fmt: skip


def run_differentiate(
    logits: Tensor, columns: Tensor, factors: Tensor, largest: Tensor, total: Tensor, present: int,
    softcap: float | None,
) -> None:  # fmt: skip
    from shardwise.models.triton_kernels import LOGITS_BLOCK, LOGITS_WARPS, differentiate

    tokens, width = logits.shape
    differentiate[(tokens,)](
        logits, columns, factors, largest, total, logits.stride()[0], present, width, softcap or 0.0,
        softcap is not None, LOGITS_BLOCK, num_warps=LOGITS_WARPS,
    )  # fmt: skip


def run_scaled(tensor: Tensor, factor: Tensor, result: Tensor) -> None:
    from shardwise.models.triton_kernels import LOGITS_BLOCK, LOGITS_WARPS, scaled

    elements = tensor.numel()
    programs = (-(-elements // LOGITS_BLOCK),)
    scaled[programs](tensor.contiguous(), factor, result, elements, LOGITS_BLOCK, num_warps=LOGITS_WARPS)
