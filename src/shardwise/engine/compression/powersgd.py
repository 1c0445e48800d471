"""PowerSGD: every matrix as the product of two low-rank factors, by one power iteration from the last step's result.

Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1. All matrices of a bucket are summed together. What is
not a matrix, or would not be smaller as two factors, is summed uncompressed together with the first factors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import Pending, all_reduce_bytes, all_reduce_sum
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.spec.less_communication import low_rank


class LowRankSum:
    """The sums of one bucket, whose tensors have ``shapes``; used like `ExchangedSum`.

    The sum is the same to the last bit on all ranks with the same kind of device.
    """

    def __init__(
        self,
        rank: int,
        shapes: Sequence[torch.Size],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        error_feedback: bool,
    ) -> None:
        self.shapes, self.group, self.ranks = list(shapes), group, group.size()
        self.widths = [int(low_rank(rank, shape[-2], shape[-1])) if len(shape) >= 2 else 0 for shape in self.shapes]
        self.states: dict[str, Tensor] = {}
        random = torch.Generator().manual_seed(0)  # the same on all ranks
        for number, (shape, width) in enumerate(zip(self.shapes, self.widths)):
            if width:
                first = torch.randn(shape[:-2].numel(), shape[-1], width, generator=random)
                self.states[f"right_{number}"] = first.to(device)
                if error_feedback:
                    self.states[f"error_{number}"] = torch.zeros(shape, device=device)
        self.sent_bytes = 0

    @torch.no_grad()
    def start(self, flat: Tensor) -> Pending:
        """As in `ExchangedSum`: `wait` makes ``flat`` the sum over all ranks."""
        self.places = _cut(flat.view(-1), self.shapes)
        self.matrices: dict[int, Tensor] = {}
        for number, place in enumerate(self.places):
            if self.widths[number]:
                error = self.states.get(f"error_{number}")
                matrix = place.float() if error is None else place.float() + error
                self.matrices[number] = matrix.reshape(-1, *place.shape[-2:])
        lefts = [matrix @ self.states[f"right_{number}"] for number, matrix in self.matrices.items()]
        plain = [place.float() for number, place in enumerate(self.places) if not self.widths[number]]
        self.first, self.work = self._summed(Called.FIRST_FACTORS, [*lefts, *plain])
        return self

    @torch.no_grad()
    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        left_shapes = [(*matrix.shape[:-1], self.widths[number]) for number, matrix in self.matrices.items()]
        plain = [number for number, width in enumerate(self.widths) if not width]
        sums = _cut(self.first, [*left_shapes, *(tuple(self.shapes[number]) for number in plain)])
        lefts = {number: torch.linalg.qr(left).Q for number, left in zip(self.matrices, sums)}
        for number, whole in zip(plain, sums[len(lefts) :]):
            self.places[number].copy_(whole)
        rights = [matrix.transpose(1, 2) @ lefts[number] for number, matrix in self.matrices.items()]
        second, work = self._summed(Called.SECOND_FACTORS, rights)
        if work is not None:
            work.wait()
        for number, right in zip(self.matrices, _cut(second, [tuple(right.shape) for right in rights])):
            whole = lefts[number] @ right.transpose(1, 2)
            self._keep(number, whole, right)
            self.places[number].copy_(whole.view(self.shapes[number]))
        del self.places, self.matrices, self.first, self.work

    def _keep(self, number: int, whole: Tensor, right: Tensor) -> None:
        """The start of the next iteration, and the error of this rank's share; nothing from a skipped step."""
        self.states[f"right_{number}"].copy_(right.nan_to_num(0.0, 0.0, 0.0))
        error = self.states.get(f"error_{number}")
        if error is not None:
            torch.sub(self.matrices[number], whole / self.ranks, out=error.view(whole.shape))
            error.nan_to_num_(0.0, 0.0, 0.0)

    def _summed(self, what: str, tensors: list[Tensor]) -> tuple[Tensor, Pending | None]:
        if not tensors:
            return torch.empty(0), None
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with sent("dp", what, flat):
            work = all_reduce_sum(flat, self.group, async_op=True)
        self.sent_bytes += all_reduce_bytes(flat, self.ranks)
        return flat, work


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]
