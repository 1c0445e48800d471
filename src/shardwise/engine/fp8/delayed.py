"""Delayed scaling: inputs and gradients are cast by the largest elements of earlier steps, not by their own.

As Transformer Engine's ``DelayedScaling`` (common/recipe: a history of 1024 steps, its maximum, no margin), which
Megatron-LM trains with unless another recipe is named. A tensor without a history, in the first step, is scaled by its
own elements. So are weights, which are cast once a step anyway. What exceeds its history saturates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

HISTORY = 1024  # steps
INPUTS, GRADIENTS = 0, 1


class DelayedScaling:
    """The histories of a rank: for each group of linear layers that share an input, those of input and gradient.

    The newest step comes first. Ranks that hold the same layers have the same histories.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.history = torch.zeros(count, 2, HISTORY, device=device)
        self.kept = torch.zeros(count, 2, device=device)  # the maximum of each history
        self.seen = torch.zeros(count, 2, device=device)  # the maximum in this step

    def of(self, number: int) -> DelayedLargest:
        return DelayedLargest(self.kept[number], self.seen[number])

    @torch.no_grad()
    def begin_step(self) -> None:
        self.kept.copy_(self.history.amax(-1))
        self.seen.zero_()

    @torch.no_grad()
    def end_step(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Adds this step to the histories; ``groups`` of ranks compute parts of the same step with the same layers."""
        for group in groups:
            dist.all_reduce(self.seen, dist.ReduceOp.MAX, group)
        finite = torch.isfinite(self.seen)
        self.history.copy_(self.history.roll(1, -1))
        self.history[..., 0] = self.seen.masked_fill(~finite, 0.0)


class DelayedLargest:
    """What the tensors of one group of layers are cast by."""

    def __init__(self, kept: Tensor, seen: Tensor) -> None:
        self.kept, self.seen = kept, seen

    def __call__(self, which: int, own: Tensor, is_trained: bool = True) -> Tensor:
        """The largest element to scale by: from the history, or the tensor's ``own`` while there is none.

        ``own`` is added to this step's maximum if ``is_trained``.
        """
        if is_trained:
            self.seen[which] = torch.maximum(self.seen[which], own)
        kept = self.kept[which]
        return torch.where(kept > 0, kept, own)
