"""Messages around a ring: each rank sends to the next and receives from the one before it, in the background."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shardwise.engine.profiler_ranges import sent, waited


class RingMessages:
    """One message each way at a time; ``tag`` tells those of several rings in flight apart on gloo."""

    def __init__(self, group: dist.ProcessGroup, dimension: str, what: str, tag: int = 0) -> None:
        self.group, self.dimension, self.what, self.tag = group, dimension, what, tag
        self._works: list[dist.Work] = []
        self._sending: Tensor | None = None

    def start(self, sending: Tensor, arriving: Tensor) -> None:
        rank, size = self.group.rank(), self.group.size()
        with sent(self.dimension, self.what, sending):
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sending, group=self.group, tag=self.tag, group_peer=(rank + 1) % size),
                    dist.P2POp(dist.irecv, arriving, group=self.group, tag=self.tag, group_peer=(rank - 1) % size),
                ]
            )
        self._sending = sending  # kept until it is sent

    def wait(self) -> None:
        """On a GPU only the stream waits."""
        with waited(self.dimension, self.what):
            for work in self._works:
                work.wait()
        self._works, self._sending = [], None
