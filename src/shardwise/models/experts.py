"""The routed experts of a layer as three stacked matrices, each multiplied in one grouped product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.models.grouped_product import grouped_product
from shardwise.models.mlp import activation_of
from shardwise.spec.model import Model


class GroupedExperts(nn.Module):
    """``gate`` and ``up`` are [experts, hidden, ffn], ``down`` [experts, ffn, hidden]; biases where there are any.

    No token is dropped: every expert gets as many rows as were routed to it.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.moe
        experts, hidden, width = model.moe.experts, model.hidden, model.moe.ffn
        self.activation = activation_of(model)
        self.gate = _matrix(experts, hidden, width) if model.gated else None
        self.up = _matrix(experts, hidden, width)
        self.down = _matrix(experts, width, hidden)
        biased = model.mlp_bias
        self.gate_bias = nn.Parameter(torch.zeros(experts, width)) if biased and model.gated else None
        self.up_bias = nn.Parameter(torch.zeros(experts, width)) if biased else None
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden)) if biased else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's MLP on its own rows: ``rows`` [n, hidden] stand expert by expert, ``counts`` [experts] each."""
        ends = counts.cumsum(0).to(torch.int32)
        up = _product(rows, self.up, self.up_bias, ends)
        if self.gate is None:
            inner = self.activation(up)
        else:
            inner = self.activation(_product(rows, self.gate, self.gate_bias, ends), up)
        return _product(inner, self.down, self.down_bias, ends)


def _matrix(experts: int, inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, inputs, outputs).normal_(std=0.02))


def _product(rows: Tensor, matrices: Tensor, biases: Tensor | None, ends: Tensor) -> Tensor:
    """Each row times the matrix of its expert, whose rows stop at its entry of ``ends``."""
    product = grouped_product(rows, matrices, ends)
    if biases is None:
        return product
    places = torch.arange(rows.shape[0], device=rows.device)[:, None]
    passed = (places < ends).to(biases.dtype)
    owned = passed.diff(dim=1, prepend=torch.zeros_like(passed[:, :1]))
    # A product rather than a lookup: the gradient of a lookup is summed in no fixed order.
    return product + owned @ biases
