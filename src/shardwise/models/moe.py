"""A mixture of experts in place of a layer's MLP: its router, its balance loss, and the layer itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.experts import (
    GroupedExperts,
    LocalExchange,
    Mixed,
    TokenExchange,
    count_tokens,
    mix_in_turn,
    save_inputs,
)
from shardwise.models.mlp import MLP
from shardwise.spec.model import Model


def _unchanged(counts: Tensor) -> Tensor:
    return counts


class BuffersInFp32(nn.Module):
    """Keeps buffers in fp32 for running sums: bf16 can neither count beyond 256 nor add a thousandth to one."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._buffers[name] = buffer.float()
        return self


class TopKRouter(BuffersInFp32):
    """Scores every expert for every token, in fp32, and picks the best ``top_k``.

    Softmax routing as in Mixtral (arXiv 2401.04088), Qwen3 and DeepSeek-V2; sigmoid routing with a balancing bias and
    groups of experts as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    ``bias`` (None without bias balancing) is added to the scores only for picking: it moves load between experts and
    does not change the weights. It is a buffer; no gradient reaches it. ``held``, if set from outside, picks the
    experts of ``hidden`` instead.
    """

    bias: Tensor | None
    held: Callable[[Tensor], Tensor] | None = None

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.top_k = model.moe.top_k
        self.sigmoid = model.moe.router == "sigmoid"
        self.groups, self.groups_used = model.moe.groups, model.moe.groups_used
        self.renormalise, self.scale = model.numerics.renormalise_top_k, model.numerics.router_scale
        self.gate = nn.Linear(model.hidden, model.moe.experts, bias=False)
        self.register_buffer("bias", torch.zeros(model.moe.experts) if model.moe.router_bias else None)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``hidden`` [tokens, features]: the experts [tokens, k], their weights, all scores [tokens, experts]."""
        logits = _wide_product(hidden, self.gate.weight)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        indices = self._pick(scores.detach()) if self.held is None else self.held(hidden.detach())
        weights = scores.gather(1, indices)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return indices, weights * self.scale, scores

    def _pick(self, scores: Tensor) -> Tensor:
        if self.bias is not None:
            scores = scores + self.bias
        if self.groups_used < self.groups:
            scores = self._within_best_groups(scores)
        return scores.topk(self.top_k, dim=-1, sorted=False).indices

    def _within_best_groups(self, scores: Tensor) -> Tensor:
        """Node-limited routing: experts outside a token's best groups are excluded.

        A group is as good as its best expert (DeepSeek-V2, arXiv 2405.04434 section 2.2.2) or, with sigmoid
        scores, as the sum of its two best (DeepSeek-V3).
        """
        grouped = torch.unflatten(scores, -1, (self.groups, -1))
        counted = min(2, grouped.shape[-1]) if self.sigmoid else 1
        merit = grouped.topk(counted, dim=-1).values.sum(-1)
        best = merit.topk(self.groups_used, dim=-1).indices
        reached = torch.zeros_like(merit, dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~reached[..., None], float("-inf")).flatten(-2)


@torch.library.custom_op("shardwise::wide_product", mutates_args=())
def _wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """A matmul in fp32 that saves its inputs as given for the backward pass, and no fp32 copies.

    A custom operator: the compiler would look inside and save the fp32 copies.
    """
    return F.linear(hidden.float(), weight.float())


@_wide_product.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=torch.float32)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight = ctx.saved_tensors
    of_hidden = gradient @ weight.float()
    of_weight = gradient.T @ hidden.float()
    return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype)


_wide_product.register_autograd(_backward, setup_context=save_inputs)


def balance_value(scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """The balance loss of each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), without its coefficient: [batch].

    ``scores`` [batch, seq, experts] are those of the tokens at hand; ``counts`` [batch, experts] says how many tokens
    of the *whole* sequence chose each expert. For a part of a sequence the value is that part's share: the shares of
    all parts add up to the value of the whole, which is 1 for an even load and larger for any other.
    """
    chosen = counts.sum(-1, keepdim=True)
    frequency = counts * (counts.shape[-1] / chosen)
    tokens = chosen / top_k
    probability = (scores / scores.sum(-1, keepdim=True)).sum(1) / tokens
    return (frequency * probability).sum(-1)


def with_gradient_of(states: Tensor, loss: Tensor) -> Tensor:
    """``states`` unchanged, through which the backward pass also reaches ``loss``, with a gradient of one.

    So a loss inside a layer needs no output of its own, even where the layer and the model's loss are on different
    stages.
    """
    attached: Tensor = _AttachedLoss.apply(states, loss)  # type: ignore[no-untyped-call]
    return attached


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.shape, loss.dtype, loss.device)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.ones(shape, dtype=dtype, device=device)


class MoELayer(BuffersInFp32):
    """Routed experts in place of a layer's MLP, and an optional shared expert that sees every token.

    What may be replaced or set from outside:

    - ``exchange`` carries tokens to experts and back (see `TokenExchange`);
    - ``mix`` runs exchange, experts and shared expert: one after the other, or overlapped;
    - ``sum_over_sequence`` turns the counts [batch, experts] of the tokens at hand into those of whole sequences;
    - ``balance_scale`` is the factor on each sequence's balance loss: the coefficient divided by the number of
      sequences of the step, times whatever the gradients of the loss are divided by later. A tensor may change every
      step without recompilation. None: the coefficient divided by the number of sequences of this call.

    ``load`` counts the tokens routed to each expert in training, until `update_bias` clears it. A layer that is
    recomputed in the backward pass adds its load twice; `update_bias` only compares it with the mean.
    """

    load: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        self.router = TopKRouter(model)
        self.experts = GroupedExperts(model)
        self.shared = MLP(model, model.moe.shared_ffn) if model.moe.shared_ffn else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if model.moe.shared_gate else None
        self.number, self.top_k = model.moe.experts, model.moe.top_k
        self.register_buffer("load", torch.zeros(self.number, dtype=torch.float32), persistent=False)
        self.balance_coefficient = model.numerics.balance_loss
        self.balance_scale: Tensor | float | None = None
        self.exchange: TokenExchange = LocalExchange(self.number)
        self.mix: Callable[..., Mixed] = mix_in_turn
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _unchanged

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        indices, weights, scores = self.router(rows)
        if self.training:
            weights = self._balanced(weights, indices, scores, batch=hidden.shape[0])
        beside = None if self.shared is None else partial(self._shared, hidden)
        mixed, shared = self.mix(self.exchange, self.experts, rows, indices, weights, beside)
        mixed = mixed.view_as(hidden)
        return mixed if shared is None else mixed + shared

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        result: Tensor = self.shared(hidden)
        return result if self.shared_gate is None else result * self.shared_gate(hidden).sigmoid()

    def _balanced(self, weights: Tensor, indices: Tensor, scores: Tensor, batch: int) -> Tensor:
        """``weights`` with the gradient of the balance loss attached; counts the load.

        It is attached to the weights, not to the output, so that a recomputed layer need not compute its output again.
        """
        counts = count_tokens(indices.view(batch, -1), self.number).float()
        # Not `+=`: the compiler refuses to assign an attribute inside a recomputed layer.
        self.load.add_(counts.sum(0))
        if not self.balance_coefficient:
            return weights
        values = balance_value(torch.unflatten(scores, 0, (batch, -1)), self.sum_over_sequence(counts), self.top_k)
        scale = self.balance_coefficient / batch if self.balance_scale is None else self.balance_scale
        return with_gradient_of(weights, values.sum() * scale)

    @torch.no_grad()
    def update_bias(self, total_load: Tensor, rate: float) -> None:
        """Moves the bias of every expert by ``rate`` towards an even load, and clears ``load``.

        ``total_load`` is the load of the whole step, summed over all ranks.
        """
        if self.router.bias is not None:
            self.router.bias += rate * torch.sign(total_load.mean() - total_load)
        self.load.zero_()
