"""The norm of the gradients of the whole network, however it is divided, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called, StepPhase
from shardwise.engine.profiler_ranges import named, sent
from shardwise.engine.torch_private import foreach_norm

REFUSED = -torch.inf  # the norm of a step that a rank wants skipped, whatever its gradients are


class GradientNorm:
    """Sums the squares of every element once: a tensor that ``copies`` ranks hold counts for a part on each.

    One number is sent, over ``group`` (the world unless given); it equals `torch.nn.utils.clip_grad_norm_`'s of the
    undivided network. Zero copies: a tensor that is not counted, being the copy of a tied one.
    """

    def __init__(
        self, copies: Sequence[float], device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> None:
        self.weights = torch.tensor([1 / one if one else 0.0 for one in copies], device=device)
        self.zero = torch.zeros((), device=device)
        self.group = group

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        refused: Tensor | None = None,
        elsewhere: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """``gradients`` are local tensors in the order of ``copies``; None if there is none in this step.

        ``elsewhere`` are norms of those that are not on the device, in the same order.

        It is REFUSED where ``refused`` is true on any rank and all gradients are finite.
        """
        there = [one for one in gradients if one is not None]
        with named(StepPhase.GRADIENT_NORM):
            norms = iter(foreach_norm(there, 2, dtype=torch.float32)) if there else iter(())
            each = torch.stack([self.zero if one is None else next(norms) for one in gradients] or [self.zero])
            if elsewhere is not None:
                each = each + torch.stack([torch.zeros(()) if one is None else one for one in elsewhere]).to(each)
            total = (each * each * self.weights).sum() if len(gradients) else self.zero.clone()
            if refused is not None:
                # Not `torch.where` with a number: it would be copied to the device, and the host would wait.
                total = total + self.zero.masked_fill(refused, REFUSED)
            group = self.group or dist.group.WORLD  # None without processes
            if group is not None:
                with sent("world", Called.GRADIENT_NORM, total):
                    all_reduce_sum(total, group)
            norm = total.sqrt()
            return norm if refused is None else norm.masked_fill(total == REFUSED, REFUSED)


def clip_divisor(norm: Tensor, maximum: float) -> Tensor:
    """What all gradients are divided by to clip them; 1 if their norm is small enough.

    The optimizer divides as it reads them: clipping takes no pass of its own.
    """
    return ((norm + 1e-6) / maximum).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_
