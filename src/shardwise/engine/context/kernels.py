"""Attention of one block of queries with one block of keys: the kernels behind the ring and the all-gather.

A kernel returns, beside the output, the logarithm of the sum of exponentials of each query's scores; by it the outputs
of several blocks of keys are merged into that of all of them, and with the merged one the backward pass of a block
gives its share of the whole gradient (Liu et al. 2023, arXiv 2310.01889). `scaled_dot_product_attention` keeps it to
itself, hence the operators under it. All tensors are [batch, seq, heads, features], key heads unrepeated, log-sum-exp
[batch, heads, seq] in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)

WIDEST_FLASH = 256  # features of a head
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


@dataclass(frozen=True)
class Scores:
    """How queries and keys are multiplied and which pairs are seen.

    ``causal``: query i sees keys up to i, of as many. ``bias`` [batch or 1, 1, queries, keys] is added.
    """

    scale: float
    causal: bool = False
    bias: Tensor | None = None


class BackwardInputs(NamedTuple):
    """What a backward pass starts from; ``out`` and ``log_sum`` are those over all blocks of keys, merged."""

    gradient: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    log_sum: Tensor

    def block(self, queries: slice, key: Tensor, value: Tensor) -> BackwardInputs:
        """Some of the queries, with one block of keys and values."""
        gradient, query, out = (tensor[:, queries] for tensor in (self.gradient, self.query, self.out))
        return BackwardInputs(gradient, query, key, value, out, self.log_sum[:, :, queries].contiguous())


class BlockKernel(Protocol):
    """``backward`` gives the gradients of this block's queries, keys and values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]: ...

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients: ...


KernelChoice = Callable[[Tensor, Tensor, bool], BlockKernel]


def kernel_for(query: Tensor, value: Tensor, biased: bool) -> BlockKernel:
    """The fastest kernel that takes these tensors."""
    wide = max(query.shape[-1], value.shape[-1]) > WIDEST_FLASH
    narrow_numbers = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type == "cpu" and query.dtype.is_floating_point:
        return CPU_FLASH
    if query.device.type == "cuda" and (narrow_numbers or query.dtype == torch.float32):
        if wide or not narrow_numbers:
            return EFFICIENT
        if _made_for_cudnn(query.device.index):
            return CUDNN
        return EFFICIENT if biased else FLASH
    return MATH


@cache
def _made_for_cudnn(device: int) -> bool:
    """Hopper and Blackwell (AMD counts its own generations by the same numbers)."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class Math:
    """Unfused, for everything that no fused kernel takes; the scores of the block are materialised."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        logits = self._logits(query, key, scores)
        log_sum = logits.logsumexp(-1)
        probabilities = (logits - log_sum.unsqueeze(-1)).exp_()
        out = torch.einsum("bhgqk,bkhd->bqhgd", probabilities, value.to(probabilities.dtype)).flatten(2, 3)
        return out.to(query.dtype), log_sum.flatten(1, 2)

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients:
        query, key, value = saved.query, saved.key, saved.value
        logits = self._logits(query, key, scores)
        number, heads = logits.dtype, key.shape[2]
        probabilities = (logits - torch.unflatten(saved.log_sum, 1, (heads, -1)).unsqueeze(-1)).exp_()
        gradient = saved.gradient.to(number)
        by_group = torch.unflatten(gradient, 2, (heads, -1))
        queries, keys = torch.unflatten(query.to(number), 2, (heads, -1)), key.to(number)
        of_value = torch.einsum("bhgqk,bqhgd->bkhd", probabilities, by_group)
        of_probabilities = torch.einsum("bqhgd,bkhd->bhgqk", by_group, value.to(number))
        mean = torch.unflatten((gradient * saved.out.to(number)).sum(-1).transpose(1, 2), 1, (heads, -1))
        of_logits = (of_probabilities - mean.unsqueeze(-1)).mul_(probabilities).mul_(scores.scale)
        of_query = torch.einsum("bhgqk,bkhd->bqhgd", of_logits, keys).flatten(2, 3)
        of_key = torch.einsum("bhgqk,bqhgd->bkhd", of_logits, queries)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)

    def _logits(self, query: Tensor, key: Tensor, scores: Scores) -> Tensor:
        """[batch, key heads, query heads of each, queries, keys]"""
        number = torch.promote_types(query.dtype, torch.float32)
        grouped = torch.unflatten(query.to(number), 2, (key.shape[2], -1))
        logits = torch.einsum("bqhgd,bkhd->bhgqk", grouped, key.to(number)) * scores.scale
        if scores.causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu_(1)
            logits.masked_fill_(later, hidden_score(number))
        return logits if scores.bias is None else logits + scores.bias.unsqueeze(1)


class _Fused(ABC):
    """A fused operator of PyTorch. It takes [batch, heads, seq, features], features padded to a ``multiple``; with
    ``one_width``, those of the narrower tensors to the widest (MLA). Zeros change no dot product."""

    multiple = 8
    one_width = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = self.fitted(query, key, value)
        out, log_sum = self.run(q, k, v, scores)
        return _back(out, value), log_sum

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients:
        inputs = saved.query, saved.key, saved.value
        q, k, v = self.fitted(*inputs)
        do, o = (_widened(tensor, v.shape[-1]).transpose(1, 2) for tensor in (saved.gradient, saved.out))
        gradients = self.differentiate(BackwardInputs(do, q, k, v, o, saved.log_sum), scores)
        dq, dk, dv = (_gradient(one, like) for one, like in zip(gradients, inputs))
        return dq, dk, dv

    def fitted(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        tensors = (query, key, value)
        widest = max(tensor.shape[-1] for tensor in tensors) if self.one_width else 0
        widths = [max(widest, tensor.shape[-1]) for tensor in tensors]
        return [_widened(one, width + -width % self.multiple).transpose(1, 2) for one, width in zip(tensors, widths)]

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def differentiate(self, fitted: BackwardInputs, scores: Scores) -> Any: ...


class CpuFlash(_Fused):
    """PyTorch's flash attention for CPUs; keys and values must have one width."""

    multiple = 1
    one_width = True

    def run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, log_sum = cpu_flash_attention(q, k, v, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale)
        return out, log_sum

    def differentiate(self, fitted: BackwardInputs, scores: Scores) -> Any:
        return cpu_flash_attention_backward(*fitted, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale)


class Flash(_Fused):
    """FlashAttention on GPUs (Dao 2023, arXiv 2307.08691): 16-bit numbers, widths a multiple of 8, no bias."""

    one_width = True

    def run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = flash_attention(q, k, v, 0.0, scores.causal, False, scale=scores.scale)
        return out, log_sum

    def differentiate(self, fitted: BackwardInputs, scores: Scores) -> Any:
        no_random = torch.empty(2, dtype=torch.uint64, device=fitted.query.device)  # state of a dropout that is zero
        lengths = (None, None, fitted.query.shape[2], fitted.key.shape[2])
        settings = 0.0, scores.causal, no_random, no_random[:0]
        return flash_attention_backward(*fitted, *lengths, *settings, scale=scores.scale)


class Cudnn(_Fused):
    """cuDNN's attention, written for Hopper and Blackwell: there nearly twice as fast as FlashAttention 2."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        bias = _aligned(scores.bias, q)
        out, log_sum, *_ = cudnn_attention(q, k, v, bias, True, 0.0, scores.causal, False, scale=scores.scale)
        return out, log_sum.squeeze(-1)

    def differentiate(self, fitted: BackwardInputs, scores: Scores) -> Any:
        do, q, k, v, o, log_sum = fitted
        no_random = torch.empty((), dtype=torch.int64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        return cudnn_attention_backward(
            do, q, k, v, o, log_sum.unsqueeze(-1), no_random, no_random, _aligned(scores.bias, q), *lengths, 0.0,
            scores.causal, scale=scores.scale,
        )  # fmt: skip


class Efficient(_Fused):
    """Memory-efficient attention on GPUs: fp32 and biases; heads are repeated for it, rows padded to 32."""

    def fitted(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
        return super().fitted(query, key, value)

    def run(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        bias = _aligned(scores.bias, q)
        out, log_sum, *_ = efficient_attention(q, k, v, bias, True, 0.0, scores.causal, scale=scores.scale)
        return out, log_sum[..., : q.shape[2]]

    def differentiate(self, fitted: BackwardInputs, scores: Scores) -> Any:
        do, q, k, v, o, log_sum = fitted
        # The kernel assumes the output's strides: dense, heads behind tokens (else it reads beyond it).
        do, o = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (do, o))
        padded = F.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=float("inf"))
        no_random = torch.empty((), dtype=torch.int64, device=q.device)
        return efficient_attention_backward(
            do, q, k, v, _aligned(scores.bias, q), o, padded, no_random, no_random, 0.0, (True, True, True, False),
            scores.causal, scale=scores.scale,
        )[:3]  # fmt: skip


MATH, CPU_FLASH, FLASH, CUDNN, EFFICIENT = Math(), CpuFlash(), Flash(), Cudnn(), Efficient()


def hidden_score(dtype: torch.dtype) -> float:
    """The score of a masked pair: finite, so that a row without any key gives no NaN.

    Such a row's log-sum-exp is so small that merging gives its block the weight zero, exactly.
    """
    return torch.finfo(dtype).min / 2


def _aligned(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """[batch, heads, queries, keys], with rows aligned for GPUs, heads without a copy."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 8))[..., :keys].expand(query.shape[0], query.shape[1], -1, -1)


def _widened(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _back(tensor: Tensor, like: Tensor) -> Tensor:
    """[batch, seq, heads, features] again, as many features as ``like`` has."""
    return tensor.transpose(1, 2)[..., : like.shape[-1]]


def _gradient(tensor: Tensor, like: Tensor) -> Tensor:
    """The gradient of ``like``: summed over the copies of its heads, without padding."""
    if tensor.shape[1] > like.shape[2]:
        tensor = torch.unflatten(tensor, 1, (like.shape[2], -1)).sum(2)
    return _back(tensor, like)
