"""The documents of all tokens of the sequences that a context-parallel group shares."""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.engine.context.sequence import join_sequence
from shardwise.engine.labels import Called
from shardwise.engine.names import sent
from shardwise.engine.reductions import all_gather


class WholeDocuments:
    """Gathers document numbers [batch, local seq] once for all layers that are given the same tensor."""

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        self.group, self.method = group, method
        self.gathered: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()
        self.handle = next(_numbers)
        _known[self.handle] = self

    def of(self, documents: Tensor | None) -> Tensor | None:
        """[batch, seq], in the order of time."""
        if documents is None:
            return None
        if torch.compiler.is_compiling():
            operator: Any = torch.ops.shardwise.whole_documents
            whole: Tensor = operator(documents, self.group.size(), self.handle)
            return whole
        known = self.gathered.get(documents)
        if known is None or known[0] != documents._version:  # overwritten since
            known = self.gathered[documents] = documents._version, self._gather(documents)
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
    return whole.clone()  # the compiler may reuse the memory of what it is given


@_whole.register_fake
def _whole_shape(documents: Tensor, size: int, handle: int) -> Tensor:
    return documents.new_empty((documents.shape[0], size * documents.shape[1]))
