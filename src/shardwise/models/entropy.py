"""Cross-entropy from the logits of some tokens, which are overwritten by their gradients: one tensor serves both.

On a GPU a kernel does it in one pass. Elsewhere a few tokens at a time are computed in fp32, by the same formulas.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.layout.pieces import WIDE_LOGITS
from shardwise.models import kernels


def softly_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits that never exceed ``softcap`` (Gemma 2, arXiv 2408.00118)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def entropy_(logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None, differentiated: bool) -> Tensor:
    """The cross-entropy of each token times its factor, in fp32, of logits [tokens, vocabulary].

    If ``differentiated``, the logits become their gradients.
    """
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
    """What the loss needs of logits [tokens, columns] of a part of the vocabulary; ``present`` columns are no padding.

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
    from shardwise.models.kernels.entropy_kernel import BLOCK, WARPS, whole

    tokens, columns = logits.shape
    whole[(tokens,)](
        logits, labels, factors, lost, logits.stride()[0], columns, softcap or 0.0, softcap is not None, differentiated,
        BLOCK, num_warps=WARPS,
    )  # fmt: skip


def run_statistics(logits: Tensor, columns: Tensor, sums: Tensor, present: int, softcap: float | None) -> None:
    from shardwise.models.kernels.entropy_kernel import BLOCK, WARPS, statistics

    tokens = len(logits)
    statistics[(tokens,)](
        logits, columns, sums, tokens, logits.stride()[0], present, softcap or 0.0, softcap is not None, BLOCK,
        num_warps=WARPS,
    )  # fmt: skip


def run_differentiate(
    logits: Tensor, columns: Tensor, factors: Tensor, largest: Tensor, total: Tensor, present: int,
    softcap: float | None,
) -> None:  # fmt: skip
    from shardwise.models.kernels.entropy_kernel import BLOCK, WARPS, differentiate

    tokens, width = logits.shape
    differentiate[(tokens,)](
        logits, columns, factors, largest, total, logits.stride()[0], present, width, softcap or 0.0,
        softcap is not None, BLOCK, num_warps=WARPS,
    )  # fmt: skip


def run_scaled(tensor: Tensor, factor: Tensor, result: Tensor) -> None:
    from shardwise.models.kernels.entropy_kernel import BLOCK, WARPS, scaled

    elements = tensor.numel()
    scaled[(-(-elements // BLOCK),)](tensor.contiguous(), factor, result, elements, BLOCK, num_warps=WARPS)
