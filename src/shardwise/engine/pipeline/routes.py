"""Messages between stages of unlike degrees: each in the pieces that both ends share (`layout.boundaries`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.labels import message_sent
from shardwise.engine.pipeline.stage import IncomingMessage, Mailbox, Message
from shardwise.engine.profiler_ranges import sent, wait_for
from shardwise.layout.boundaries import SharedPiece, pieces_received, pieces_sent
from shardwise.spec.job import Job


@dataclass(frozen=True)
class Routes:
    """By neighbouring pipeline rank: what this rank sends of a tensor, and what it receives, piece by piece."""

    sent: Mapping[int, tuple[SharedPiece, ...]]
    received: Mapping[int, tuple[SharedPiece, ...]]


def routes_of(job: Job, rank: int) -> Routes:
    """Of one rank, to all pipeline ranks: folded and interleaved schedules have other neighbours than the next."""
    stages = range(job.strategy.pp)
    return Routes(
        {stage: pieces_sent(job, rank, stage) for stage in stages},
        {stage: pieces_received(job, rank, stage) for stage in stages},
    )


class RoutedMailbox(Mailbox):
    """Ranks of the whole world send to each other: ``group`` is of all of them, ``own_group`` of this one."""

    def __init__(
        self, group: dist.ProcessGroup, own_group: dist.ProcessGroup, message: Message, routes: Routes
    ) -> None:
        super().__init__(group, message)
        self.own_group, self.routes = own_group, routes

    def send(self, tensor: Tensor, rank: int, what: str) -> None:
        self.message.check(tensor, what)
        self.leaving = [(work, kept) for work, kept in self.leaving if not work.is_completed()]
        for one in self.routes.sent[rank]:
            part = _part(tensor.detach(), one).contiguous()
            with sent("pp", message_sent(what), part):
                work = dist.isend(part, one.rank, group=self.group)
            assert work is not None
            self.leaving.append((work, part))

    def receive(self, rank: int, what: str) -> IncomingMessage:
        whole = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.message.device)
        pieces = self.routes.received[rank]
        parts = [torch.empty_like(_part(whole, one), memory_format=torch.contiguous_format) for one in pieces]
        works = [dist.irecv(part, one.rank, group=self.group) for part, one in zip(parts, pieces)]
        return IncomingPieces(whole, None, what, pieces, parts, works)

    def tell(self, loss: Tensor, rank: int) -> None:
        """Nothing: the last stage adds up the losses of its ranks first."""


@dataclass(frozen=True)
class IncomingPieces(IncomingMessage):
    """A tensor whose pieces are on their way."""

    pieces: Sequence[SharedPiece] = ()
    parts: Sequence[Tensor] = ()
    works: Sequence[dist.Work | None] = ()

    def wait(self) -> Tensor:
        for piece, part, work in zip(self.pieces, self.parts, self.works):
            wait_for(work, "pp", self.what)
            _part(self.tensor, piece).copy_(part)
        return self.tensor


def _part(tensor: Tensor, piece: SharedPiece) -> Tensor:
    return tensor[slice(*piece.rows), slice(*piece.tokens)]
