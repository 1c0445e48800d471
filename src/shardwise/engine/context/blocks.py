"""Attention by blocks of keys, for the ring and the all-gather: kernels, masks, and merging of outputs.

Besides the output, a kernel returns the log-sum-exp of each query's scores. With it the outputs of several blocks of
keys are merged; given the merged log-sum-exp, the backward pass of a block yields its share of the whole gradient (Liu
et al. 2023, arXiv 2310.01889). `scaled_dot_product_attention` does not return it, so the operators beneath are called.
All tensors are [batch, seq, heads, features], key heads unrepeated, log-sum-exp [batch, heads, seq] in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
    window_attention,
    window_attention_backward,
)
from shardwise.models import flash_attention_4
from shardwise.models.dot_product import takes

WIDEST_FLASH = 256  # features of a head
MASK_ELEMENTS = 2**25  # of one bias tensor: more queries are taken in pieces
SHORTEST_PIECE = 256  # queries, for which a kernel is still efficient
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


@dataclass(frozen=True)
class Scores:
    """How queries and keys are multiplied, and which keys a query sees."""

    scale: float
    causal: bool = False  # query i sees keys up to i; there are as many keys as queries
    bias: Tensor | None = None  # added to the scores: [batch or 1, 1, queries, keys]


class BackwardInputs(NamedTuple):
    """What a backward pass starts from."""

    gradient: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor  # merged over all blocks of keys, as is `log_sum`
    log_sum: Tensor

    def block(self, queries: slice, key: Tensor, value: Tensor) -> BackwardInputs:
        """Some of the queries, with one block of keys and values."""
        gradient, query, out = (tensor[:, queries] for tensor in (self.gradient, self.query, self.out))
        return BackwardInputs(gradient, query, key, value, out, self.log_sum[:, :, queries].contiguous())


class BlockKernel(Protocol):
    """A kernel for one block: ``backward`` returns the gradients of its queries, keys and values."""

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
        if not biased and flash_attention_4.fits(query, value):
            return FLASH_4
        if _is_hopper_or_blackwell(query.device.index):
            return CUDNN
        return EFFICIENT if biased else FLASH
    return MATH


@cache
def _is_hopper_or_blackwell(device: int) -> bool:
    """AMD uses the same numbers for generations of its own, hence the check for CUDA."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class Math:
    """Plain matmuls, for what no fused kernel takes; the scores of the block are materialised."""

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
    """A fused operator of PyTorch, which takes [batch, heads, seq, features].

    Features are padded by zeros, which change no dot product.
    """

    multiple = 8
    """Of which the number of features has to be a multiple."""
    one_width = False
    """Queries, keys and values are padded to the widest of the three (MLA)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = self.fitted(query, key, value)
        out, log_sum = self.run(q, k, v, scores)
        return _back(out, value), log_sum

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients:
        inputs = saved.query, saved.key, saved.value
        q, k, v = self.fitted(*inputs)
        do, o = (_widened(tensor, v.shape[-1]).transpose(1, 2) for tensor in (saved.gradient, saved.out))
        gradients = self.differentiate(BackwardInputs(do, q, k, v, o, saved.log_sum), scores)
        dq, dk, dv = (_gradient_of(tensor, gradient) for tensor, gradient in zip(inputs, gradients))
        return dq, dk, dv

    def fitted(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        tensors = (query, key, value)
        widest = max(tensor.shape[-1] for tensor in tensors) if self.one_width else 0
        widths = [max(widest, tensor.shape[-1]) for tensor in tensors]
        return [
            _widened(tensor, width + -width % self.multiple).transpose(1, 2) for tensor, width in zip(tensors, widths)
        ]

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


class Flash4:
    """FlashAttention-4, where it `fits`; without a bias. It takes tensors as they are."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, log_sum = flash_attention_4.forward(query, key, value, None, *self._seen(query, scores))
        return out, log_sum

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients:
        of_query, of_key, of_value = flash_attention_4.backward(*saved, *self._seen(saved.query, scores))
        return of_query, of_key, of_value

    def _seen(self, query: Tensor, scores: Scores) -> tuple[Any, ...]:
        return None, query.shape[1], scores.causal, None, scores.scale


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


MATH, CPU_FLASH, FLASH, FLASH_4, CUDNN, EFFICIENT = Math(), CpuFlash(), Flash(), Flash4(), Cudnn(), Efficient()


def hidden_score(dtype: torch.dtype) -> float:
    """The score of a masked pair: finite, so that a row without any key gives no NaN.

    The log-sum-exp of such a row is so small that merging gives its block a weight of exactly zero.
    """
    return torch.finfo(dtype).min / 2


def _aligned(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """The bias as [batch, heads, queries, keys], rows aligned for GPUs; expanded over heads without a copy."""
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


def _gradient_of(tensor: Tensor, fitted: Tensor) -> Tensor:
    """The gradient of ``tensor`` from that of its ``fitted`` form: repeated heads are summed, padding is dropped."""
    if fitted.shape[1] > tensor.shape[2]:
        fitted = torch.unflatten(fitted, 1, (tensor.shape[2], -1)).sum(2)
    return _back(fitted, tensor)


# -- A window or packed documents: a query sees only some of the keys --------------------------------


@dataclass(frozen=True)
class WindowKernel:
    """FlashAttention for tensors that `dot_product.takes`. The last query's own key is the last key."""

    before: int  # keys that a query sees before its own
    behind: int  # keys that it sees behind its own

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        lengths = None, None, query.shape[1], key.shape[1]
        out, log_sum, *_ = window_attention(query, key, value, *lengths, 0.0, False, False, **self._settings(scores))
        return out, log_sum

    def backward(self, saved: BackwardInputs, scores: Scores) -> Gradients:
        no_random = torch.zeros(2, dtype=torch.uint64, device=saved.query.device)
        arguments = None, None, saved.query.shape[1], saved.key.shape[1], 0.0, False, no_random, no_random
        of_query, of_key, of_value = window_attention_backward(*saved, *arguments, **self._settings(scores))
        return of_query, of_key, of_value

    def _settings(self, scores: Scores) -> dict[str, Any]:
        return {"scale": scores.scale, "window_size_left": self.before, "window_size_right": self.behind}


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees where a window or packed documents hide some. Queries and keys are contiguous runs."""

    causal: bool
    window: int | None = None
    first_query: int = 0  # where in the sequence the queries start
    first_key: int = 0  # where the keys start
    query_documents: Tensor | None = None  # the number of each query's document, [batch, seq]
    key_documents: Tensor | None = None

    def window_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> WindowKernel | None:
        """The kernel for a window without documents, if it takes the tensors (on a GPU)."""
        if self.window is None or self.query_documents is not None or not takes(query, key, value):
            return None
        last = self.first_key + key.shape[1] - self.first_query - query.shape[1]  # keys behind the last query's own
        before, behind = self.window - 1 + last, (0 if self.causal else self.window - 1) - last
        return WindowKernel(before, behind) if min(before, behind) >= 0 else None

    def pieces(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Runs of queries, for each the run of keys that some of them see, and the bias that masks the other pairs."""
        queries, keys = query.shape[1], key.shape[1]
        rows = max(SHORTEST_PIECE, MASK_ELEMENTS // (query.shape[0] * keys))
        if self.window is not None:
            rows = min(rows, max(SHORTEST_PIECE, self.window))
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            here = self._keys_of(start, stop, keys)
            yield slice(start, stop), here, self._bias(start, stop, here, query)

    def _keys_of(self, start: int, stop: int, keys: int) -> slice:
        """The keys that queries ``start`` to ``stop`` see; at least one key, since kernels require it."""
        start, stop = start + self.first_query - self.first_key, stop + self.first_query - self.first_key
        first, end = 0, keys
        if self.window is not None:
            first = start - self.window + 1
            end = stop + self.window - 1
        if self.causal:
            end = min(end, stop)
        first = min(max(first, 0), keys - 1)
        return slice(first, max(first + 1, min(end, keys)))

    def _bias(self, start: int, stop: int, keys: slice, query: Tensor) -> Tensor:
        device = query.device
        behind = (
            torch.arange(start + self.first_query, stop + self.first_query, device=device)[:, None]
            - torch.arange(keys.start + self.first_key, keys.stop + self.first_key, device=device)[None, :]
        )
        seen = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (behind.abs() < self.window)
        if self.query_documents is not None and self.key_documents is not None:
            seen = seen & (self.query_documents[:, start:stop, None] == self.key_documents[:, None, keys])
        else:
            seen = seen[None]
        bias = torch.zeros(seen.shape, dtype=query.dtype, device=device)
        return bias.masked_fill_(~seen, hidden_score(query.dtype))[:, None]


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, seen: Seen | None = None,
    choose: KernelChoice = kernel_for,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [batch, queries, heads, features] and log-sum-exp [batch, heads, queries] of one block."""
    kernel = choose(query, value, seen is not None)
    if seen is None:
        return kernel.forward(query, key, value, scores)
    if (window := seen.window_kernel(query, key, value)) is not None:
        return window.forward(query, key, value, scores)
    outs, log_sums = [], []
    for queries, keys, bias in seen.pieces(query, key):
        out, log_sum = kernel.forward(query[:, queries], key[:, keys], value[:, keys], Scores(scores.scale, bias=bias))
        outs.append(out)
        log_sums.append(log_sum)
    return torch.cat(outs, 1), torch.cat(log_sums, 2)


def attention_block_backward(
    saved: BackwardInputs, scores: Scores, seen: Seen | None = None, choose: KernelChoice = kernel_for
) -> Gradients:
    """A block's share of the gradients."""
    query, key, value = saved.query, saved.key, saved.value
    kernel = choose(query, value, seen is not None)
    if seen is None:
        return kernel.backward(saved, scores)
    if (window := seen.window_kernel(query, key, value)) is not None:
        return window.backward(saved, scores)
    of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, keys, bias in seen.pieces(query, key):
        piece = saved.block(queries, key[:, keys], value[:, keys])
        of_query[:, queries], add_key, add_value = kernel.backward(piece, Scores(scores.scale, bias=bias))
        of_key[:, keys] += add_key
        of_value[:, keys] += add_value
    return of_query, of_key, of_value


class Merged:
    """The output and log-sum-exp over all blocks of keys so far, in fp32. A block may cover only some queries."""

    def __init__(self, out: Tensor, log_sum: Tensor) -> None:
        self.number = out.dtype
        self.out = out.to(torch.promote_types(out.dtype, torch.float32))
        self.log_sum = log_sum

    @classmethod
    def nothing(cls, query: Tensor, value: Tensor) -> Merged:
        """Before any block."""
        number = torch.promote_types(query.dtype, torch.float32)
        batch, seq, heads, _ = query.shape
        log_sum = torch.full((batch, heads, seq), float("-inf"), dtype=number, device=query.device)
        return cls(query.new_zeros((batch, seq, heads, value.shape[-1])), log_sum)

    def add(self, out: Tensor, log_sum: Tensor, queries: slice = slice(None)) -> None:
        before, merged = self.log_sum[:, :, queries], self.out[:, queries]
        weight = torch.sigmoid(log_sum - before).transpose(1, 2).unsqueeze(-1)
        merged.lerp_(out.to(merged.dtype), weight)
        before.copy_(torch.logaddexp(before, log_sum))

    def result(self, some_rows_empty: bool = False) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp. ``some_rows_empty``: a query that saw no key at all gets zeros and no gradient."""
        out, log_sum = self.out.to(self.number).contiguous(), self.log_sum.contiguous()
        if some_rows_empty:
            empty = log_sum < hidden_score(self.number) / 2
            out = out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
            log_sum = log_sum.masked_fill(empty, float("inf"))
        return out, log_sum
