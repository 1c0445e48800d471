"""Multi-token prediction: modules behind the last layer that predict the tokens after the next.

DeepSeek-V3, arXiv 2412.19437, section 2.2: module k joins the state before it with the embedding of the k-th token
ahead, and its layer predicts the token after that. Embedding and head are those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.dot_product import AttentionArguments
from shardwise.models.layer import Layer
from shardwise.models.loss import IGNORED
from shardwise.models.norms import norm_of
from shardwise.models.rope import Rotation
from shardwise.spec.model import Model


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
