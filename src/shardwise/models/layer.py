"""A layer of a decoder: attention and MLP, each with its norms; and layers that predict the tokens after the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.attention import Attention, MultiHeadLatentAttention, Rotation
from shardwise.models.compiled_layer import gated_down, normed_beside, normed_projection
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.dropout import TokenKeys
from shardwise.models.loss import IGNORED
from shardwise.models.mlp import MLP, is_plain, project_each
from shardwise.models.moe import MoELayer
from shardwise.models.norms import RMSNorm, norm_of
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
        self.residual_scale = model.numerics.residual_scale
        self.token_keys: TokenKeys | None = None  # what adapters with dropout read
        self.attention_norm = norm_of(model) if before else None
        self.attention = MultiHeadLatentAttention(model) if model.mla else Attention(model)
        self.attention_out_norm = norm_of(model) if behind else None
        self.mlp_norm = norm_of(model) if before and model.norms_per_layer > 1 else None
        self.mlp = MoELayer(model) if moe else MLP(model, model.ffn)
        self.mlp_out_norm = norm_of(model) if behind else None

    def forward(self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments) -> Tensor:
        if self.token_keys is not None:
            self.token_keys.now = arguments.token_keys
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
            and self.residual_scale == 1
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
        if behind is None and self.residual_scale == 1 and not isinstance(part, MoELayer):
            summed: Tensor = part(*inputs, residual=hidden)
            return summed
        return hidden + scaled(_normed(behind, part(*inputs)), self.residual_scale)


def scaled(states: Tensor, factor: float) -> Tensor:
    """The states times a constant, rounded to their own precision first."""
    return states if factor == 1 else states * torch.tensor(factor, dtype=states.dtype).item()


def _normed(norm: nn.Module | None, states: Tensor) -> Tensor:
    if norm is None:
        return states
    normed: Tensor = norm(states)
    return normed


# -- Multi-token prediction: modules behind the last layer -----------------------------------------
# DeepSeek-V3, arXiv 2412.19437, section 2.2: module k joins the state before it with the embedding of the k-th token
# ahead, and its layer predicts the token after that. Embedding and head are those of the model.


class PredictionLayer(Layer):
    """A layer that reads two normed states joined by a projection; its own norm comes before the shared head.

    The embedding comes first in the projection, and module k+1 reads the normed output of module k, as in the published
    weights (``eh_proj``, ``enorm``, ``hnorm``, ``shared_head.norm``) and in Megatron-LM (multi_token_prediction.py).
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, moe=model.moe is not None)
        self.token_norm, self.hidden_norm = norm_of(model), norm_of(model)
        self.joined = nn.Linear(2 * model.hidden, model.hidden, bias=False)
        self.norm = norm_of(model)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments, token: Tensor
    ) -> Tensor:
        joined = self.joined(torch.cat((self.token_norm(token), self.hidden_norm(hidden)), -1))
        normed: Tensor = self.norm(super().forward(joined, rotation, arguments))
        return normed


def is_of_prediction(name: str, model: Model) -> bool:
    """Whether a tensor of a `Decoder`, by its name there, belongs to a prediction module."""
    part, _, rest = name.partition(".")
    return part == "layers" and model.layers <= int(rest.partition(".")[0]) < model.layers + model.mtp_layers


def is_behind_layers(name: str, model: Model) -> bool:
    """Whether a tensor belongs to a prediction module that this description of the model has left out."""
    part, _, rest = name.partition(".")
    return part == "layers" and int(rest.partition(".")[0]) >= model.layers + model.mtp_layers


@dataclass(frozen=True)
class Ahead:
    """What prediction modules read and predict: [batch, seq, modules]."""

    tokens: Tensor  # that each module reads
    labels: Tensor  # that it predicts

    def with_labels(self, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """All labels along the batch, the model's first, and the weight of each: L + weight/D · Σ L_k (equation 25)."""
        every = torch.cat((labels, *self.labels.unbind(-1)))
        shares = torch.full_like(every, weight / self.labels.shape[-1], dtype=torch.float32)
        shares[: labels.shape[0]] = 1.0
        return every, shares


def ahead_of(tokens: Tensor, labels: Tensor, documents: Tensor | None, modules: int) -> Ahead:
    """What prediction modules read and predict, from whole sequences; labels in other documents do not count."""
    read, predicted = [], []
    for distance in range(1, modules + 1):
        step = min(distance, tokens.shape[1])
        label = F.pad(labels[:, step:], (0, step), value=IGNORED)
        if documents is not None:
            same = F.pad(documents[:, step:] == documents[:, : documents.shape[1] - step], (0, step), value=False)
            label = label.where(same, IGNORED)
        read.append(F.pad(tokens[:, step:], (0, step)))
        predicted.append(label)
    return Ahead(torch.stack(read, -1), torch.stack(predicted, -1))
