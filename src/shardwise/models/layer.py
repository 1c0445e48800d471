"""A layer of a decoder: attention and MLP, each with its norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.attention import Attention, attention_of
from shardwise.models.compiled_layer import gated_down, normed_beside, normed_projection
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.mlp import MLP, is_plain, project_each
from shardwise.models.moe import MoELayer
from shardwise.models.norms import RMSNorm, norm_of
from shardwise.models.rope import Rotation
from shardwise.spec.model import Model


class Layer(nn.Module):
    """``attention`` is `Attention` or `MultiHeadLatentAttention`, ``mlp`` an `MLP` or a `MoELayer`.

    ``attention_norm`` and ``mlp_norm`` come before them, ``attention_out_norm`` and ``mlp_out_norm`` after; a norm that
    the model does not have is None. In a ``parallel`` layer both read the layer's input. A compiled layer that
    ``remakes`` keeps neither normed states nor activations for its backward pass.
    """

    def __init__(self, model: Model, *, moe: bool) -> None:
        super().__init__()
        before, behind = not model.norm_after, model.norm_after or model.norms_per_layer == 4
        self.parallel, self.remakes = model.parallel_block, False
        self.attention_norm = norm_of(model) if before else None
        self.attention = attention_of(model)
        self.attention_out_norm = norm_of(model) if behind else None
        self.mlp_norm = norm_of(model) if before and model.norms_per_layer > 1 else None
        self.mlp = MoELayer(model) if moe else MLP(model, model.ffn)
        self.mlp_out_norm = norm_of(model) if behind else None

    def forward(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        if self.remakes and torch.compiler.is_compiling():
            return self._remaking(hidden, rotation, arguments)
        if self.parallel:
            read = _normed(self.attention_norm, hidden)
            inner = read if self.mlp_norm is None else self.mlp_norm(hidden)
        else:
            read, hidden = normed_beside(self.attention_norm, hidden)
        hidden = self._plus(hidden, self.attention, self.attention_out_norm, read, rotation, arguments)
        if not self.parallel:
            inner, hidden = normed_beside(self.mlp_norm, hidden)
        return self._plus(hidden, self.mlp, self.mlp_out_norm, inner)

    def can_remake(self) -> bool:
        """Whether the compiled backward pass of this layer can recompute norms and activations in its own kernels."""
        plain = type(self.attention) is Attention and type(self.mlp) is MLP and self.mlp.is_swiglu
        behind = self.parallel or self.attention_out_norm or self.mlp_out_norm
        norms = (self.attention_norm, self.mlp_norm)
        parts = (self.attention, self.mlp)
        return (
            plain
            and not behind
            and all(type(norm) is RMSNorm and norm.weighted and not norm.plus_one for norm in norms)
            and all(part.project is project_each for part in parts)
            and all(is_plain(linear) for part in parts for linear in part.modules() if isinstance(linear, nn.Linear))
        )

    def _remaking(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        """`forward` that keeps neither the normed states nor the activation."""
        attention: Any = self.attention
        mlp: Any = self.mlp
        projected, hidden = normed_projection(self.attention_norm, hidden, attention.projections())
        hidden = attention.from_projections(projected, rotation, arguments, hidden)
        (gate, up), hidden = normed_projection(self.mlp_norm, hidden, mlp.projections())
        return gated_down(gate, up, mlp.down, hidden)

    def _plus(self, hidden: Tensor, part: nn.Module, behind: nn.Module | None, *inputs: Any) -> Tensor:
        """Adds the output of attention or MLP to the hidden states, through the norm behind it if there is one."""
        if behind is None and not isinstance(part, MoELayer):
            summed: Tensor = part(*inputs, residual=hidden)
            return summed
        return hidden + _normed(behind, part(*inputs))


def _normed(norm: nn.Module | None, states: Tensor) -> Tensor:
    if norm is None:
        return states
    normed: Tensor = norm(states)
    return normed


def window_of(model: Model, index: int) -> int | None:
    """The sliding window of a layer; every n-th layer has none if the model says so."""
    everywhere = model.sliding_window_every == 1
    return model.sliding_window if everywhere or (index + 1) % model.sliding_window_every else None
