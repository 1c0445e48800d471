"""1-bit Adam: ranks exchange momentum, whose errors feed back into itself and never reach the second moments.

Tang et al. 2021, arXiv 2102.02888, algorithm 1: after some exact steps the second moments are frozen, every rank moves
the common momentum by its own gradient, and the mean of these, as signs, is the next momentum. Here the optimizer gets
the gradient that moves its momentum there, so that all that is linear in gradients (sums over tensor-parallel ranks,
tied ends) needs no change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.engine.collectives.reductions import Pending
from shardwise.engine.compression.quantised import ExchangedSum


class MomentumSum:
    """Like `ExchangedSum`, for the momentum that the gradients of one bucket make.

    Call `follow` before the first sum.
    """

    def __init__(self, exchanged: ExchangedSum) -> None:
        self.exchanged = exchanged
        self.states = exchanged.states
        self.momenta: Sequence[Tensor] = ()
        self.kept = 0.0

    @property
    def sent_bytes(self) -> int:
        return self.exchanged.sent_bytes

    def follow(self, momenta: Sequence[Tensor], kept: float) -> None:
        """``kept`` of the momentum is left after a step (the optimizer's beta1); the rest is the new gradient."""
        self.momenta, self.kept = momenta, kept

    def start(self, flat: Tensor) -> Pending:
        self.flat = flat
        self.moved = self._kept_momentum().div_(self.exchanged.ranks)
        self.moved.add_(flat.view(-1), alpha=1 - self.kept)
        self.exchanged.start(self.moved)
        return self

    def wait(self) -> None:
        self.exchanged.wait()
        gradient = self.moved.sub_(self._kept_momentum()).div_(1 - self.kept)
        self.flat.view(-1).copy_(gradient)
        del self.flat, self.moved

    def _kept_momentum(self) -> Tensor:
        return torch.cat([one.view(-1) for one in self.momenta]).mul_(self.kept)
