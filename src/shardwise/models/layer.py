"""A layer of a decoder: attention and MLP, each with its norms."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.models.attention import attention_of
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.mlp import MLP
from shardwise.models.moe import MoELayer
from shardwise.models.norms import norm_of
from shardwise.models.rope import Rotation
from shardwise.spec.model import Model


class Layer(nn.Module):
    """``attention`` is `Attention` or `MultiHeadLatentAttention`, ``mlp`` an `MLP` or a `MoELayer`.

    ``attention_norm`` and ``mlp_norm`` come before them, ``attention_out_norm`` and ``mlp_out_norm`` after; what the
    model does not have is None. In a ``parallel`` layer both read the layer's input.
    """

    def __init__(self, model: Model, *, moe: bool) -> None:
        super().__init__()
        before, behind = not model.norm_after, model.norm_after or model.norms_per_layer == 4
        self.parallel = model.parallel_block
        self.attention_norm = norm_of(model) if before else None
        self.attention = attention_of(model)
        self.attention_out_norm = norm_of(model) if behind else None
        self.mlp_norm = norm_of(model) if before and model.norms_per_layer > 1 else None
        self.mlp = MoELayer(model) if moe else MLP(model, model.ffn)
        self.mlp_out_norm = norm_of(model) if behind else None

    def forward(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        read = _normed(self.attention_norm, hidden)
        mixed = _normed(self.attention_out_norm, self.attention(read, rotation, arguments))
        if self.parallel and self.mlp_norm is not None:
            read = self.mlp_norm(hidden)
        hidden = hidden + mixed
        if not self.parallel:
            read = _normed(self.mlp_norm, hidden)
        result: Tensor = hidden + _normed(self.mlp_out_norm, self.mlp(read))
        return result


def _normed(norm: nn.Module | None, states: Tensor) -> Tensor:
    if norm is None:
        return states
    normed: Tensor = norm(states)
    return normed


def window_of(model: Model, index: int) -> int | None:
    """The sliding window of a layer; every n-th layer has none if the model says so."""
    everywhere = model.sliding_window_every == 1
    return model.sliding_window if everywhere or (index + 1) % model.sliding_window_every else None
