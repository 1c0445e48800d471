"""A communicator that counts what leaves this rank, message by message."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwise.engine.collectives import Communicator
from shardwise.layout.ranks import node_of


class CountingGroup:
    """Stands before a process group: everything goes through, and what is sent is counted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sent: list[tuple[int, int]] = []  # to which rank, how many bytes

    def send(self, tensors: list[Any], peer: int, tag: int) -> Any:
        self.sent.append((peer, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return self.group.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class CountingCommunicator(Communicator):
    """Of all ranks; what it has sent so far."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.counting = CountingGroup(world)
        super().__init__(world)

    def _step(self, *arguments: Any) -> None:
        """gloo's messages leave here: through the group that counts."""
        group, self.group = self.group, self.counting  # type: ignore[assignment]
        try:
            super()._step(*arguments)
        finally:
            self.group = group

    @property
    def messages(self) -> int:
        return len(self.counting.sent)

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.counting.sent)

    def sent_to_other_nodes(self, ranks_per_node: int) -> int:
        """Bytes that left the node of this rank."""
        here = node_of(self.group.rank(), ranks_per_node)
        return sum(size for peer, size in self.counting.sent if node_of(peer, ranks_per_node) != here)
