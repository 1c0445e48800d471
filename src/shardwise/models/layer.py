"""One decoder layer: attention and MLP, each on normed states and added back (pre-norm)."""

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
    """``attention`` is `Attention` or `LatentAttention`, ``mlp`` an `MLP` or a `MixtureOfExperts`."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        self.attention_norm = norm_of(model)
        self.attention = attention_of(model)
        self.mlp_norm = norm_of(model)
        self.mlp = MixtureOfExperts(model) if model.is_moe_layer(index) else MLP(model, model.ffn)

    def forward(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, arguments)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result
