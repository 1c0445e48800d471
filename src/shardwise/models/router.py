"""Which experts a token goes to, and with what weight.

Softmax routing as in Mixtral (arXiv 2401.04088), Qwen3 and DeepSeek-V2; sigmoid routing with a balancing bias and
groups of experts as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.buffers import BuffersInFp32
from shardwise.spec.model import Model


class Router(BuffersInFp32):
    """Scores every expert for every token, in fp32, and picks the best ``top_k``.

    ``bias`` (None without bias balancing) is added to the scores only while picking: it moves load between
    experts and leaves the weights alone. It is a buffer; no gradient reaches it.
    """

    bias: Tensor | None

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
        indices = self._pick(scores.detach())
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
        """Node-limited routing: experts outside a token's best groups are out of reach.

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
    """The product in fp32, which keeps for its backward what it was given and no wider copy.

    An operator of its own: the compiler would look inside and keep the wider copy.
    """
    return F.linear(hidden.float(), weight.float())


@_wide_product.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    hidden, weight = ctx.saved_tensors
    of_hidden = gradient @ weight.float()
    of_weight = gradient.T @ hidden.float()
    return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype)


_wide_product.register_autograd(_backward, setup_context=_save)
