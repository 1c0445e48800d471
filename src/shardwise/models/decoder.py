"""The decoder: embedding, layers, final norm, head; any of them may be removed, and the rest still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.models.attention import attention_of, attention_scale
from shardwise.models.dot_product import AttentionArguments, document_bounds
from shardwise.models.loss import cross_entropy_sum, softly_capped
from shardwise.models.mlp import MLP
from shardwise.models.moe import MoELayer
from shardwise.models.norms import norm_of
from shardwise.models.rope import Rotation, rotation_of
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.support import not_built


class Layer(nn.Module):
    """``attention`` is `Attention` or `MultiHeadLatentAttention`, ``mlp`` an `MLP` or a `MoELayer`.

    ``attention_norm`` and ``mlp_norm`` come before them, ``attention_out_norm`` and ``mlp_out_norm`` after; what the
    model does not have is None. In a ``parallel`` layer both read the layer's input.
    """

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        before, behind = not model.norm_after, model.norm_after or model.norms_per_layer == 4
        self.parallel = model.parallel_block
        self.attention_norm = norm_of(model) if before else None
        self.attention = attention_of(model)
        self.attention_out_norm = norm_of(model) if behind else None
        self.mlp_norm = norm_of(model) if before and model.norms_per_layer > 1 else None
        self.mlp = MoELayer(model) if model.is_moe_layer(index) else MLP(model, model.ffn)
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


LossFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


class Decoder(nn.Module):
    """A decoder-only language model by its description.

    ``embedding``, ``position_embedding``, ``norm`` and ``head`` may be set to None and any of ``layers``, which are
    keyed by their index, deleted: what is left maps hidden states to hidden states. ``loss_function`` takes hidden
    states, the head's weight and bias, and labels, so that it never has to hold all logits; it may be replaced.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        for one in not_built(model):  # what the decoder would silently get wrong
            raise SpecError(one.field, f"{one.reason} ({model.name})", one.remedy)
        self.model = model
        learned = model.positions == "learned"
        self.embedding: nn.Embedding | None = nn.Embedding(model.vocab, model.hidden)
        self.position_embedding = nn.Embedding(model.max_seq, model.hidden) if learned else None
        self.layers = nn.ModuleDict({str(index): Layer(model, index) for index in range(model.layers)})
        self.norm = norm_of(model) if model.final_norm else None
        self.head: nn.Linear | None = nn.Linear(model.hidden, model.vocab, bias=model.lm_head_bias)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.loss_function: LossFunction = partial(cross_entropy_sum, softcap=model.numerics.logit_softcap)

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        most_documents: int | None = None,
    ) -> Tensor:
        """The summed loss, logits or hidden states, whatever the last remaining part produces.

        ``inputs`` are token ids [batch, seq], or hidden states [batch, seq, hidden] where there is no embedding.
        ``labels`` [batch, seq] stand where they are predicted (the caller has shifted them); those equal to
        -100 do not count. ``positions`` [batch or 1, seq] count from 0 along the row unless given, and
        ``documents`` [batch, seq] keep packed documents from seeing each other; no row has more than
        ``most_documents`` (unless given, a GPU takes a slower way).
        """
        places = positions
        if places is None:
            places = torch.arange(inputs.shape[1], device=inputs.device)[None]
        hidden = self._embed(inputs, places)
        rotation, windowed_rotation = self._rotations(places)
        bounds = None
        if documents is not None and most_documents is not None and documents.is_cuda:
            bounds = document_bounds(documents, most_documents)
        softcap, scale = self.model.numerics.attention_softcap, attention_scale(self.model)
        for index, layer in self.layers.items():
            window = window_of(self.model, int(index))
            arguments = AttentionArguments(self.model.causal, window, scale, documents, positions, bounds, softcap)
            hidden = layer(hidden, rotation if window is None else windowed_rotation, arguments)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        if labels is not None:
            return self.loss_function(hidden, self.head.weight, self.head.bias, labels)
        logits: Tensor = self.head(hidden)
        return softly_capped(logits, self.model.numerics.logit_softcap)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, each once, and its persistent buffers."""
        yield from self.named_parameters()
        kept = self.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in kept)

    def _embed(self, inputs: Tensor, places: Tensor) -> Tensor:
        hidden: Tensor = inputs if self.embedding is None else self._scaled(self.embedding(inputs))
        if self.position_embedding is None:
            return hidden
        if places.shape[1] > self.model.max_seq:
            problem = f"{places.shape[1]} tokens are more than the {self.model.max_seq} positions {self.model.name} has"
            raise SpecError("training.seq", problem, "use shorter sequences")
        embedded: Tensor = hidden + self.position_embedding(places)
        return embedded

    def _scaled(self, embedded: Tensor) -> Tensor:
        scale = self.model.numerics.embedding_scale
        return embedded if scale == 1 else embedded * torch.tensor(scale, dtype=embedded.dtype).item()

    def _rotations(self, places: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """The rotation of layers that see all keys, and of those with a window."""
        if self.model.positions != "rope":
            return None, None
        everywhere = rotation_of(self.model, places)
        if self.model.numerics.windowed_rope_theta is None:
            return everywhere, everywhere
        return everywhere, rotation_of(self.model, places, windowed=True)


def window_of(model: Model, index: int) -> int | None:
    """The sliding window of a layer; every n-th layer has none if the model says so."""
    everywhere = model.sliding_window_every == 1
    return model.sliding_window if everywhere or (index + 1) % model.sliding_window_every else None
