"""Attention over gathered keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

One all-gather brings the keys and values of all ranks into sequence order, so that windows and packed documents are
masks over contiguous runs. With the zig-zag cut (`sequence`) each half of a rank's queries sees a
contiguous run of earlier chunks, and its own chunk causally; the own chunks are computed during the all-gather. The
backward pass gathers again instead of keeping the keys and values, and sums the gradients by reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.context.blocks import BackwardInputs, Gradients, Merged, Seen
from shardwise.engine.context.distributed_attention import AttentionCall
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent, wait_for


class GatheredAttention(AttentionCall):
    """Attention over gathered keys and values.

    Plain causal attention computes a rank's own chunks separately (`own_apart`); otherwise all is done by `_runs`.
    """

    @property
    def masked(self) -> bool:
        return self.window is not None or self.documents is not None

    @property
    def own_apart(self) -> bool:
        return self.causal and not self.masked

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        gather = _GatherKeys(self.group, key, value, self.overlap)
        if self.own_apart:
            out, log_sum = self.block(_chunks(query), _chunks(key), _chunks(value), causal=True)
            merged = Merged(_in_row(out), torch.unflatten(log_sum, 0, (-1, 2)).transpose(1, 2).flatten(2))
        else:
            merged = Merged.nothing(query, value)
        key, value = gather.finish()
        for queries, keys, seen in self._runs(query.shape[1]):
            merged.add(*self.block(query[:, queries], key[:, keys], value[:, keys], seen=seen), queries)
        return merged.result(some_rows_empty=self.masked)

    def backward(self, saved: BackwardInputs) -> Gradients:
        query, key, value = saved.query, saved.key, saved.value
        gather = _GatherKeys(self.group, key, value, self.overlap)
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        own: tuple[Tensor, Tensor] | None = None
        if self.own_apart:
            log_sums = torch.unflatten(saved.log_sum, 2, (2, -1)).transpose(1, 2).flatten(0, 1).contiguous()
            gradient, own_query, own_key, own_value, out = (_chunks(tensor) for tensor in saved[:-1])
            chunks = BackwardInputs(gradient, own_query, own_key, own_value, out, log_sums)
            add_query, of_key, of_value = self.block_backward(chunks, causal=True)
            of_query += _in_row(add_query)
            own = _in_row(of_key), _in_row(of_value)
        key, value = gather.finish()
        of_key, of_value = gather.gradients()
        for queries, keys, seen in self._runs(query.shape[1]):
            block = saved.block(queries, key[:, keys], value[:, keys])
            add_query, add_key, add_value = self.block_backward(block, seen=seen)
            of_query[:, queries] += add_query
            of_key[:, keys] += add_key
            of_value[:, keys] += add_value
        del key, value  # frees what was gathered before the gradients are copied into the order of the ranks
        of_key, of_value = gather.reduce_gradients()
        if own:
            of_key, of_value = of_key + own[0], of_value + own[1]
        return of_query.to(query.dtype), of_key, of_value

    def _runs(self, length: int) -> Iterator[tuple[slice, slice, Seen | None]]:
        """Runs of the rank's queries, the keys of the whole sequence for each, and which of these are seen."""
        rank, size, half = self.group.rank(), self.group.size(), length // 2
        total = length * size
        if not self.causal and not self.masked:
            yield slice(0, length), slice(0, total), None
            return
        for queries, first in ((slice(0, half), rank * half), (slice(half, length), total - (rank + 1) * half)):
            if not self.masked:
                if first:
                    yield queries, slice(0, first), None
                continue
            reach = total if self.window is None else self.window - 1
            keys = slice(max(0, first - reach), first + half if self.causal else min(total, first + half + reach))
            documents = self.documents
            of_queries, of_keys = (
                None if documents is None else documents[:, run] for run in (slice(first, first + half), keys)
            )
            yield queries, keys, Seen(self.causal, self.window, first, keys.start, of_queries, of_keys)


class _GatherKeys:
    """The all-gather of keys and values, and the reduce-scatter of their gradients.

    Both are sent as [seq, batch, heads, features of key and value]: with the sequence first, what the ranks send is
    concatenated in memory, and key and value are views.
    """

    def __init__(self, group: dist.ProcessGroup, key: Tensor, value: Tensor, overlap: bool) -> None:
        self.group, self.size, self.width = group, group.size(), key.shape[-1]
        self.packed = torch.cat([key, value], -1).transpose(0, 1).contiguous()
        self.stacked = self.packed.new_empty((self.size * self.packed.shape[0], *self.packed.shape[1:]))
        with sent("cp", Called.KEYS_AND_VALUES, self.packed):
            self.work = all_gather(self.stacked, self.packed, group, async_op=overlap)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, whole seq, heads, features] in sequence order."""
        wait_for(self.work, "cp", Called.KEYS_AND_VALUES)
        halves = self.stacked.chunk(2 * self.size)
        in_time = torch.cat([*halves[0::2], *reversed(halves[1::2])])
        del self.stacked
        return self._views(in_time)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Zeros in the shapes of `finish`, to accumulate into."""
        self.summed = self.packed.new_zeros((self.size * self.packed.shape[0], *self.packed.shape[1:]))
        return self._views(self.summed)

    def reduce_gradients(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the sum over all ranks."""
        chunks = self.summed.chunk(2 * self.size)
        pairs = zip(chunks[: self.size], reversed(chunks[self.size :]), strict=True)
        by_rank = torch.cat([chunk for pair in pairs for chunk in pair])
        mine = torch.empty_like(self.packed)
        with sent("cp", Called.KEY_VALUE_GRADIENTS, by_rank):
            reduce_scatter_sum(mine, by_rank, self.group)
        return self._views(mine)

    def _views(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        key, value = packed.transpose(0, 1).tensor_split([self.width], -1)
        return key, value


def _chunks(tensor: Tensor) -> Tensor:
    """The two chunks of each sequence as two sequences, in one batch."""
    return torch.unflatten(tensor, 1, (2, -1)).flatten(0, 1)


def _in_row(tensor: Tensor) -> Tensor:
    return torch.unflatten(tensor, 0, (-1, 2)).flatten(1, 2)
