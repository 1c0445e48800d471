"""The sum of a bucket as codes: every rank adds up its piece of all ranks' codes in fp32, and sends it as codes again.

Both roundings can be fed back: each rank keeps what its own codes left out, and the owner of a piece what the codes of
the sum left out. All ranks decode the same bytes, so that they have the same sum to the last bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.compression.codecs import Codec
from shardwise.engine.labels import Called
from shardwise.engine.names import sent
from shardwise.engine.reductions import Pending, all_gather


class ExchangedSum:
    """The sums of one bucket of ``elements``, one after the other. ``start`` begins one, ``wait`` writes it.

    ``states`` are what error feedback keeps from one sum to the next; ``sent_bytes`` is what left this rank.
    """

    def __init__(
        self, codec: Codec, elements: int, group: dist.ProcessGroup, device: torch.device, *, error_feedback: bool
    ) -> None:
        self.codec, self.elements, self.group = codec, elements, group
        self.ranks = group.size()
        blocks = -(-elements // codec.block)
        self.blocks_each = -(-blocks // self.ranks)
        self.states: dict[str, Tensor] = {}
        if error_feedback:
            rows = (self.ranks * self.blocks_each, codec.block)
            self.states["own"] = torch.zeros(rows, device=device)
            self.states["sum"] = torch.zeros(self.blocks_each, codec.block, device=device)
        self.sent_bytes = 0

    def start(self, flat: Tensor) -> Pending:
        """``flat`` has to stay until `wait`, which makes it the sum over all ranks."""
        self.flat = flat
        values = flat.new_zeros(self.ranks * self.blocks_each * self.codec.block, dtype=torch.float32)
        values[: self.elements].copy_(flat.view(-1))
        self.codes = self._encoded("own", values.view(-1, self.codec.block))
        self.received = torch.empty_like(self.codes)
        with sent("dp", Called.GRADIENT_CODES, self.codes):
            self.work = dist.all_to_all_single(self.received, self.codes, group=self.group, async_op=True)
        return self

    def wait(self) -> None:
        self.work.wait()
        self._count(self.codes)
        total = None
        for part in self.received.view(self.ranks, self.blocks_each, -1):
            total = self.codec.decode(part) if total is None else total.add_(self.codec.decode(part))
        assert total is not None
        summed = self._encoded("sum", total)
        whole = self.received  # its pieces have been added
        with sent("dp", Called.CODES_OF_SUMS, whole):
            all_gather(whole.view(-1), summed.view(-1), self.group)
        self._count(whole)
        self.flat.view(-1).copy_(self.codec.decode(whole).view(-1)[: self.elements])
        del self.flat, self.codes, self.received, self.work

    def _encoded(self, name: str, values: Tensor) -> Tensor:
        """The codes of the gradient plus the error feedback; the new rounding error is kept for the next step."""
        error = self.states.get(name)
        if error is None:
            return self.codec.encode(values)
        values = values + error
        codes = self.codec.encode(values)
        torch.sub(values, self.codec.decode(codes), out=error)
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a step that is left out leaves nothing behind
        return codes

    def _count(self, whole: Tensor) -> None:
        """All but this rank's own piece leaves it."""
        self.sent_bytes += whole.numel() * (self.ranks - 1) // self.ranks
