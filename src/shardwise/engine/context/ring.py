"""Ring attention: keys and values travel from rank to rank while each rank attends to those it holds.

With the zig-zag cut (`sequence`), every rank has the same work in every step under a causal mask: its own tokens
first, then half of the pairs of queries and keys, which are either all queries with the early half of the keys or the
late half of the queries with all keys. (Megatron-LM balances by such pairs of chunks too; Brandon et al. 2023, arXiv
2311.09431, by stripes.) PyTorch's own ring does not run on CPUs and repeats key heads.

The backward pass sends keys and values around again, and their gradients one step behind them. The share of a rank's
own queries never leaves that rank, so both take cp−1 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.communicator import RingMessages
from shardwise.engine.context.blocks import BackwardInputs, Gradients, Merged, Seen
from shardwise.engine.context.distributed_attention import AttentionCall
from shardwise.engine.context.sequence import cut_sequence
from shardwise.engine.labels import Called
from shardwise.spec.errors import SpecError

KEYS_TAG, GRADIENTS_TAG = 1, 2  # gloo matches messages in flight by tag, NCCL by their order


@dataclass(frozen=True)
class RingAttention(AttentionCall):
    """What is seen in each step, and the two passes around the ring."""

    def __post_init__(self) -> None:
        if self.window is not None:
            problem = f"ring does not support a window of {self.window} keys"
            raise SpecError("strategy.context_method", problem, "use context_method: all-gather or ulysses")

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layout = _Packed(key, value)
        exchange = _RingExchange(self.group, KEYS_TAG, Called.PASSED_KEYS_AND_VALUES, self.overlap)
        travelling = layout.pack(key, value)
        merged: Merged | None = None
        for step in range(self.group.size()):
            if not self._last(step):
                exchange.start(travelling)
            queries, keys, causal = self._halves(step, query.shape[1])
            seen = self._seen(step, queries, keys)
            block = self.block(query[:, queries], key[:, keys], value[:, keys], causal, seen)
            if merged is None:
                merged = Merged(*block)
            else:
                merged.add(*block, queries)
            if not self._last(step):
                travelling = exchange.finish()
                key, value = layout.unpack(travelling)
        assert merged is not None
        return merged.result(some_rows_empty=self.documents is not None)

    def backward(self, saved: BackwardInputs) -> Gradients:
        query, key, value = saved.query, saved.key, saved.value
        layout = _Packed(key, value)
        exchange = _RingExchange(self.group, KEYS_TAG, Called.PASSED_KEYS_AND_VALUES, self.overlap)
        gradients = _RingExchange(self.group, GRADIENTS_TAG, Called.PASSED_GRADIENTS, self.overlap)
        travelling = layout.pack(key, value)
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        for step in range(self.group.size()):
            if not self._last(step):
                exchange.start(travelling)
            queries, keys, causal = self._halves(step, query.shape[1])
            block = saved.block(queries, key[:, keys], value[:, keys])
            add_query, add_key, add_value = self.block_backward(block, causal, self._seen(step, queries, keys))
            of_query[:, queries] += add_query
            if step == 0:
                of_key, of_value = add_key, add_value
            else:
                passed_on = gradients.finish() if step > 1 else torch.zeros_like(travelling)
                layout.add(passed_on, keys, add_key, add_value)
                gradients.start(passed_on)
            if not self._last(step):
                travelling = exchange.finish()
                key, value = layout.unpack(travelling)
        came_home = layout.unpack(gradients.finish())
        return of_query.to(query.dtype), came_home[0] + of_key, came_home[1] + of_value

    def _last(self, step: int) -> bool:
        return step == self.group.size() - 1

    def _halves(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """The queries and keys of this step, and whether they are masked causally."""
        whole, half = slice(0, length), length // 2
        if step == 0 or not self.causal:
            return whole, whole, self.causal
        if step <= self.group.rank():  # keys of an earlier rank, whose late half comes after all queries here
            return whole, slice(0, half), False
        return slice(half, length), whole, False

    def _seen(self, step: int, queries: slice, keys: slice) -> Seen | None:
        """The mask of a block by packed documents, which may cross blocks."""
        if self.documents is None:
            return None
        rank, size = self.group.rank(), self.group.size()
        here = cut_sequence(self.documents, rank, size, "ring")[:, queries]
        there = cut_sequence(self.documents, (rank - step) % size, size, "ring")[:, keys]
        return Seen(self.causal and step == 0, query_documents=here, key_documents=there)


class _Packed:
    """Keys and values in one buffer: one message."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key_shape, self.value_shape, self.split = key.shape, value.shape, key.numel()

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return packed[: self.split].view(self.key_shape), packed[self.split :].view(self.value_shape)

    def add(self, packed: Tensor, tokens: slice, key: Tensor, value: Tensor) -> None:
        keys, values = self.unpack(packed)
        keys[:, tokens] += key
        values[:, tokens] += value


class _RingExchange:
    """Each rank sends a buffer to the next and receives one from the one before it, into two buffers in turn."""

    def __init__(self, group: dist.ProcessGroup, tag: int, what: str, overlap: bool) -> None:
        self.messages, self.overlap = RingMessages(group, "cp", what, tag), overlap
        self.received: list[Tensor] = []
        self.started = 0

    def start(self, sending: Tensor) -> None:
        if len(self.received) < 2:
            self.received.append(torch.empty_like(sending))
        self.messages.start(sending, self.received[self.started % 2])
        self.started += 1
        if not self.overlap:
            self.messages.wait()

    def finish(self) -> Tensor:
        """What was received; on a GPU only the stream waits for it."""
        self.messages.wait()
        return self.received[(self.started - 1) % 2]
