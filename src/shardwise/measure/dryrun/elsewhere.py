"""Memory that is not the device's, for offloaded tensors without values: it holds nothing, and is reached at once.

Offloaded memory is freed and fetched memory is allocated when the engine says so: it waits for every copy no later than
the plan has it gone or present.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shardwise.engine.offload.store import BackgroundCopy, Lanes, Store, StoredRegion
from shardwise.measure.dryrun.replacing import replaced


def nothing_moves() -> AbstractContextManager[None]:
    """Stores made inside take everything and keep nothing."""
    return replaced((Store, "region", _region), (Lanes, "_run", _over))


class _Nowhere(StoredRegion):
    def __init__(self, lanes: Lanes, size: int, in_host: bool) -> None:
        super().__init__(lanes, size)
        self.in_host = in_host

    def write(self, at: int, tensor: Tensor) -> BackgroundCopy:
        return self.lanes.out(_nothing, tensor)

    def read(self, at: int, into: Tensor) -> BackgroundCopy:
        return self.lanes.back(_nothing, into)

    def add(self, at: int, tensor: Tensor, norm: Tensor, *, is_first: bool) -> BackgroundCopy:
        return self.lanes.out(_nothing, tensor)

    def in_memory(self, at: int, size: int) -> Tensor | None:
        """While they are updated the few elements of a chunk count as the device's: far from its peak."""
        return torch.empty(size, dtype=torch.uint8) if self.in_host else None


def _region(store: Store, size: int) -> StoredRegion:
    return _Nowhere(store.lanes, size, store.target == "cpu")


def _over(lanes: Lanes, out: bool, work: Callable[[], None], tensors: tuple[Tensor, ...]) -> BackgroundCopy:
    """A copy that is over; its tensors are kept until somebody has waited for it, as those of others are."""
    future: Future[None] = Future()
    future.set_result(None)
    return BackgroundCopy(future, *tensors)


def _nothing() -> None:
    pass
