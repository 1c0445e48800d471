"""A mixture of experts in place of a layer's MLP: route, exchange, experts, exchange back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.models.balance import balance_value, with_gradient_of
from shardwise.models.buffers import BuffersInFp32
from shardwise.models.exchange import Exchange, LocalExchange, count_tokens
from shardwise.models.experts import GroupedExperts
from shardwise.models.mlp import MLP
from shardwise.models.router import Router
from shardwise.spec.model import Model

__all__ = ["Exchange", "GroupedExperts", "LocalExchange", "MixtureOfExperts", "Router"]


def _as_it_is(counts: Tensor) -> Tensor:
    return counts


class MixtureOfExperts(BuffersInFp32):
    """Routed experts, and beside them an optional shared one that sees every token.

    What may be replaced or set from outside:

    - ``exchange`` carries tokens to experts and back (see `Exchange`);
    - ``sum_over_sequence`` turns the counts [batch, experts] of the tokens at hand into those of whole sequences;
    - ``balance_scale`` is what each sequence's balance loss is multiplied by: the coefficient over the number of
      sequences of the step, times whatever else the gradients of the loss are later divided by. A tensor may change
      every step without a recompilation. None: the coefficient over the sequences of this call.

    ``load`` adds up how many tokens each expert was chosen for in training, until `update_bias` clears it. A layer that
    is recomputed in the backward pass adds its load twice; `update_bias` only minds who has more than the mean.
    """

    load: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.router = Router(model)
        self.experts = GroupedExperts(model)
        self.shared = MLP(model, model.moe.shared_ffn) if model.moe.shared_ffn else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if model.moe.shared_gate else None
        self.number, self.top_k = model.moe.experts, model.moe.top_k
        self.register_buffer("load", torch.zeros(self.number, dtype=torch.float32), persistent=False)
        self.balance_coefficient = model.numerics.balance_loss
        self.balance_scale: Tensor | float | None = None
        self.exchange: Exchange = LocalExchange(self.number)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        indices, weights, scores = self.router(rows)
        if self.training:
            weights = self._balanced(weights, indices, scores, batch=hidden.shape[0])
        sorted_rows, counts, handle = self.exchange.dispatch(rows, indices)
        mixed = self.exchange.combine(self.experts(sorted_rows, counts), weights, handle)
        mixed = mixed.view_as(hidden)
        if self.shared is not None:
            mixed = mixed + self._shared(hidden)
        return mixed

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        result: Tensor = self.shared(hidden)
        return result if self.shared_gate is None else result * self.shared_gate(hidden).sigmoid()

    def _balanced(self, weights: Tensor, indices: Tensor, scores: Tensor, batch: int) -> Tensor:
        """``weights`` itself, the load noted and the gradient of the balance loss attached.

        To the weights and not to the output: a layer that is recomputed then need not make its output again.
        """
        counts = count_tokens(indices.view(batch, -1), self.number).float()
        # Not `+=`: the compiler takes no assignment to an attribute inside a layer that is recomputed.
        self.load.add_(counts.sum(0))
        if not self.balance_coefficient:
            return weights
        values = balance_value(torch.unflatten(scores, 0, (batch, -1)), self.sum_over_sequence(counts), self.top_k)
        scale = self.balance_coefficient / batch if self.balance_scale is None else self.balance_scale
        return with_gradient_of(weights, values.sum() * scale)

    @torch.no_grad()
    def update_bias(self, total_load: Tensor, rate: float) -> None:
        """Moves the bias of every expert by ``rate`` towards an even load, and clears ``load``.

        ``total_load`` is the load of the whole step, wherever its tokens were.
        """
        if self.router.bias is not None:
            self.router.bias += rate * torch.sign(total_load.mean() - total_load)
        self.load.zero_()
