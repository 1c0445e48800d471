"""Which tokens of a sequence a context-parallel rank holds, and the documents of all of them.

- ring and all-gather: of 2·cp equal chunks, rank r holds chunks r and 2·cp−1−r (zig-zag). Under a causal mask late
  tokens see more keys than early ones, so every rank gets a cheap early chunk and an expensive late one.
- ulysses: one contiguous piece each. Attention runs on whole sequences of some heads, so there is nothing to balance,
  and the exchanged pieces arrive in order.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.engine.collectives.reductions import all_gather
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import version_of
from shardwise.spec.errors import SpecError

SEQUENCE = 1  # dimension of [batch, sequence, ...]
ZIGZAG = ("ring", "all-gather")


def check_sequence(seq: int, size: int, method: str) -> None:
    """Refuses a sequence that does not divide into the chunks that the method needs."""
    chunks = 2 * size if method in ZIGZAG else size
    if size > 1 and seq % chunks:
        problem = f"{size} with {method} cuts sequences of {seq} tokens into {chunks} equal chunks"
        raise SpecError("strategy.cp", problem, f"use a multiple of {chunks} as training.seq")


def cut_sequence(tensor: Tensor, rank: int, size: int, method: str) -> Tensor:
    """The part [batch, local sequence, ...] of ``tensor`` [batch, sequence, ...] that belongs to ``rank``."""
    if size == 1:
        return tensor
    check_sequence(tensor.shape[SEQUENCE], size, method)
    if method not in ZIGZAG:
        return tensor.chunk(size, SEQUENCE)[rank].contiguous()
    chunks = tensor.chunk(2 * size, SEQUENCE)
    return torch.cat([chunks[rank], chunks[-1 - rank]], SEQUENCE)


def join_sequence(parts: Sequence[Tensor], method: str) -> Tensor:
    """The whole sequence from the parts of all ranks, in the order of the ranks."""
    if method not in ZIGZAG:
        return torch.cat(list(parts), SEQUENCE)
    early, late = zip(*(part.chunk(2, SEQUENCE) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], SEQUENCE)


class WholeDocuments:
    """Gathers document numbers [batch, local seq] once for all layers that pass the same tensor."""

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        self.group, self.method = group, method
        self.cache: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()
        self.handle = next(_numbers)
        _known[self.handle] = self

    def of(self, documents: Tensor | None) -> Tensor | None:
        """[batch, seq], in sequence order."""
        if documents is None:
            return None
        if torch.compiler.is_compiling():
            operator: Any = torch.ops.shardwise.whole_documents
            whole: Tensor = operator(documents, self.group.size(), self.handle)
            return whole
        known = self.cache.get(documents)
        if known is None or known[0] != version_of(documents):  # overwritten since
            known = self.cache[documents] = version_of(documents), self._gather(documents)
        return known[1]

    def _gather(self, documents: Tensor) -> Tensor:
        documents = documents.contiguous()
        stacked = documents.new_empty((self.group.size() * documents.shape[0], documents.shape[1]))
        with sent("cp", Called.DOCUMENTS, documents):
            all_gather(stacked, documents, self.group)
        return join_sequence(stacked.chunk(self.group.size()), self.method)


# -- the same as an operator, for compiled blocks ------------------------------------------------------------------

_numbers = count()
_known: WeakValueDictionary[int, WholeDocuments] = WeakValueDictionary()


@torch.library.custom_op(
    "shardwise::whole_documents", mutates_args=(), schema="(Tensor documents, int size, int handle) -> Tensor"
)
def _whole(documents: Tensor, size: int, handle: int) -> Tensor:
    whole = _known[handle].of(documents)
    assert whole is not None
    return whole.clone()  # the compiler may reuse the memory of what is returned


@_whole.register_fake
def _whole_shape(documents: Tensor, size: int, handle: int) -> Tensor:
    return documents.new_empty((documents.shape[0], size * documents.shape[1]))
