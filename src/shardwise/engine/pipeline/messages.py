"""Hidden states and their gradients on the way between two ranks of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.labels import Called, message_sent
from shardwise.engine.names import sent, waited


@dataclass(frozen=True)
class Message:
    """What every message is: a microbatch's hidden states as one rank holds them, or their gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def check(self, tensor: Tensor, what: str) -> None:
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            found, promised = (tuple(tensor.shape), tensor.dtype), (self.shape, self.dtype)
            raise RuntimeError(f"{what} {found} where the next stage expects {promised}")


class Mailbox:
    """Sends and receives of one rank; a tensor is freed once it has been sent.

    The runtime would keep every sent tensor until the step ends: two per microbatch and stage.
    """

    def __init__(self, group: dist.ProcessGroup, message: Message) -> None:
        self.group, self.message = group, message
        self.leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, rank: int, what: str) -> None:
        self.message.check(tensor, what)
        tensor = tensor.detach().contiguous()
        self.leaving = [(work, kept) for work, kept in self.leaving if not work.is_completed()]
        with sent("pp", message_sent(what), tensor):
            work = dist.isend(tensor, group=self.group, group_dst=rank)
        assert work is not None
        self.leaving.append((work, tensor))

    def receive(self, rank: int, what: str) -> Arrival:
        buffer = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.message.device)
        work = dist.irecv(buffer, group=self.group, group_src=rank)
        return Arrival(buffer, work, what)

    def finish(self) -> None:
        """Everything has left: on a GPU for what the device does next, not for the host."""
        with waited("pp", Called.ALL_SENDS):
            for work, _ in self.leaving:
                work.wait()
        self.leaving.clear()


@dataclass(frozen=True)
class Arrival:
    """A tensor that is there, or on its way."""

    tensor: Tensor
    work: dist.Work | None = None
    what: str = ""

    def wait(self) -> Tensor:
        if self.work is not None:
            with waited("pp", self.what):
                self.work.wait()
        return self.tensor
