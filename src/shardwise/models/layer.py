"""One decoder layer: attention and MLP, each added to the hidden states, with norms before it, behind it, or both."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.models.attention import attention_of
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.mlp import MLP
from shardwise.models.moe import MixtureOfExperts
from shardwise.models.norms import norm_of
from shardwise.models.rope import Rotation
from shardwise.spec.model import Model


class Layer(nn.Module):
    """``attention`` is `Attention` or `LatentAttention`, ``mlp`` an `MLP` or a `MixtureOfExperts`.

    ``attention_norm`` and ``mlp_norm`` stand before them, ``attention_out_norm`` and ``mlp_out_norm`` behind; what the
    model does not have is None. In a ``parallel`` layer both read the hidden states that came in.
    """

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        before, behind = not model.norm_after, model.norm_after or model.norms_per_layer == 4
        self.parallel = model.parallel_block
        self.attention_norm = norm_of(model) if before else None
        self.attention = attention_of(model)
        self.attention_out_norm = norm_of(model) if behind else None
        self.mlp_norm = norm_of(model) if before and model.norms_per_layer > 1 else None
        self.mlp = MixtureOfExperts(model) if model.is_moe_layer(index) else MLP(model, model.ffn)
        self.mlp_out_norm = norm_of(model) if behind else None

    def forward(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        read = _normed(self.attention_norm, hidden)
        mixed = _normed(self.attention_out_norm, self.attention(read, rotation, arguments))
        if self.parallel:
            if self.mlp_norm is not None:
                read = self.mlp_norm(hidden)
            hidden = hidden + mixed
        else:
            hidden = hidden + mixed
            read = _normed(self.mlp_norm, hidden)
        result: Tensor = hidden + _normed(self.mlp_out_norm, self.mlp(read))
        return result


def _normed(norm: nn.Module | None, states: Tensor) -> Tensor:
    if norm is None:
        return states
    normed: Tensor = norm(states)
    return normed
