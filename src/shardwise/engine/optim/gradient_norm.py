"""The norm of the gradients of the whole network, however it is divided, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called, StepPhase
from shardwise.engine.optim.one_pass import TensorTables, aligned, triton_type
from shardwise.engine.profiler_ranges import named, sent
from shardwise.engine.torch_private import foreach_norm
from shardwise.models import kernels

REFUSED = -torch.inf  # the norm of a step that a rank wants skipped, whatever its gradients are


class GradientNorm:
    """The norm of all gradients: a tensor that ``copies`` ranks hold counts for its share on each of them.

    One number is sent, over ``group`` (the world unless given). The norm equals that of
    `torch.nn.utils.clip_grad_norm_` for the undivided network. A tensor with zero copies is not counted: it is the
    second copy of a tied one.
    """

    def __init__(
        self, copies: Sequence[float], device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> None:
        self.weights = torch.tensor([1 / ranks if ranks else 0.0 for ranks in copies], device=device)
        self.zero = torch.zeros((), device=device)
        self.group = group
        self.tables = TensorTables()

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        refused: Tensor | None = None,
        elsewhere: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """The norm of local ``gradients``, in the order of ``copies``; None: the tensor has none in this step.

        ``elsewhere`` are the norms of those that are not on the device, in the same order. The result is REFUSED if
        ``refused`` is true on any rank and all gradients are finite.
        """
        with named(StepPhase.GRADIENT_NORM):
            total = self._in_one_pass(gradients) if kernels.run_on(self.zero.device) else self._plain(gradients)
            if elsewhere is not None:
                zero = next((torch.zeros_like(norm) for norm in elsewhere if norm is not None), self.zero)
                norms = torch.stack([zero if norm is None else norm for norm in elsewhere]).to(total.device)
                total = total + (norms * norms * self.weights).sum()
            if refused is not None:
                # Not `torch.where` with a number: it would be copied to the device, and the host would wait.
                total = total + self.zero.masked_fill(refused, REFUSED)
            group = self.group or dist.group.WORLD  # None without processes
            if group is not None:
                with sent("world", Called.GRADIENT_NORM, total):
                    all_reduce_sum(total, group)
            norm = total.sqrt()
            return norm if refused is None else norm.masked_fill(total == REFUSED, REFUSED)

    def _plain(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The sum of squares."""
        there = [gradient for gradient in gradients if gradient is not None]
        if not there:
            return self.zero.clone()
        norms = iter(foreach_norm(there, 2, dtype=torch.float32))
        each = torch.stack([self.zero if gradient is None else next(norms) for gradient in gradients])
        return (each * each * self.weights).sum()

    def _in_one_pass(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The same by a launch for each format."""
        from shardwise.engine.optim.kernels import NORM_BLOCK, NORM_WARPS, squares

        there = [
            (place, gradient.contiguous())
            for place, gradient in enumerate(gradients)
            if gradient is not None and gradient.numel()
        ]
        alike: dict[tuple[torch.dtype, bool], list[tuple[int, int, int]]] = {}
        for place, gradient in there:
            row = (place, gradient.data_ptr(), gradient.numel())
            alike.setdefault((gradient.dtype, aligned([row[1]])), []).append(row)
        sums_of_squares = []
        for (dtype, is_aligned), rows in alike.items():
            table = self.tables.of(self.zero.device, rows, NORM_BLOCK)
            sums = torch.empty(table.programs, dtype=torch.float32, device=self.zero.device)
            kind = (triton_type(dtype), is_aligned, NORM_BLOCK)
            squares[(table.programs,)](table.rows, table.owners, self.weights, sums, *kind, num_warps=NORM_WARPS)
            sums_of_squares.append(sums.sum())
        return torch.stack(sums_of_squares).sum() if sums_of_squares else self.zero.clone()


def clip_divisor(norm: Tensor, maximum: float) -> Tensor:
    """What all gradients are divided by to clip them; 1 if their norm is small enough.

    The optimizer divides as it reads them: clipping takes no pass of its own.
    """
    return ((norm + 1e-6) / maximum).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_
