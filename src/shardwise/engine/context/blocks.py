"""Attention with several blocks of keys, merged; which pairs of queries and keys are seen; sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.context.kernels import BackwardInputs, Gradients, KernelChoice, Scores, hidden_score, kernel_for
from shardwise.engine.torch_private import window_attention, window_attention_backward
from shardwise.models.dot_product import takes

MASK_ELEMENTS = 2**25  # of one bias tensor: more queries are taken in pieces
SHORTEST_PIECE = 256  # queries, for which a kernel is still efficient


@dataclass(frozen=True)
class WindowKernel:
    """FlashAttention for the tensors that `dot_product.takes`: a query sees so many keys ``before`` and ``behind``
    its own, and the last query's own key is the last key."""

    before: int
    behind: int

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
    """Which keys a query sees if it is neither all nor the plain causal ones: by a window, or by packed documents.

    Queries and keys are contiguous runs that start at ``first_query`` and ``first_key`` of one sequence;
    ``query_documents`` and ``key_documents`` [batch, seq] number their documents.
    """

    causal: bool
    window: int | None = None
    first_query: int = 0
    first_key: int = 0
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    def window_kernel(self, query: Tensor, key: Tensor, value: Tensor) -> WindowKernel | None:
        """The kernel for a window by itself, where one takes the tensors (on a GPU)."""
        if self.window is None or self.query_documents is not None or not takes(query, key, value):
            return None
        last = self.first_key + key.shape[1] - self.first_query - query.shape[1]  # keys behind the last query's own
        before, behind = self.window - 1 + last, (0 if self.causal else self.window - 1) - last
        return WindowKernel(before, behind) if min(before, behind) >= 0 else None

    def pieces(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Runs of queries, the run of keys that any of them sees, and the bias that masks the others."""
        queries, keys = query.shape[1], key.shape[1]
        rows = max(SHORTEST_PIECE, MASK_ELEMENTS // (query.shape[0] * keys))
        if self.window is not None:
            rows = min(rows, max(SHORTEST_PIECE, self.window))
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            here = self._keys_of(start, stop, keys)
            yield slice(start, stop), here, self._bias(start, stop, here, query)

    def _keys_of(self, start: int, stop: int, keys: int) -> slice:
        """The keys of queries ``start`` to ``stop``; at least one, which kernels require."""
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
    """The output and log-sum-exp over all blocks of keys so far, in fp32; blocks may cover some queries only."""

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
        """``some_rows_empty``: a query that saw no key at all gets zeros, and a log-sum-exp that gives no gradient."""
        out, log_sum = self.out.to(self.number).contiguous(), self.log_sum.contiguous()
        if some_rows_empty:
            empty = log_sum < hidden_score(self.number) / 2
            out = out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
            log_sum = log_sum.masked_fill(empty, float("inf"))
        return out, log_sum
