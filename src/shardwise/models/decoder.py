"""The decoder: embedding, layers, final norm, head; any of them may be removed, and the rest still runs.

The initial values of its parameters are here too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels
from shardwise.models.adapters import initial_adapter, is_of_adapter
from shardwise.models.attention import Rotation, attention_scale, query_growth, rotation_of
from shardwise.models.dot_product import AttentionArguments, document_bounds
from shardwise.models.dropout import keys_in_layer
from shardwise.models.layer import Ahead, Layer, PredictionLayer, ahead_of, scaled
from shardwise.models.loss import cross_entropy_sum, softly_capped
from shardwise.models.mlp import initial_curvature
from shardwise.models.norms import norm_of
from shardwise.spec.errors import SpecError
from shardwise.spec.layers import LONGEST
from shardwise.spec.model import Model
from shardwise.spec.support import not_built


class Packed(NamedTuple):
    """The documents that are packed into rows."""

    documents: Tensor | None
    """Their numbers [batch, seq]."""
    bounds: Tensor | None
    """Where they begin and end, for the kernel of a GPU."""
    most: int | None
    """The most in any row, where that is known; without documents each row is one."""

    @classmethod
    def of(cls, documents: Tensor | None, most: int | None) -> Packed:
        if documents is None:
            return cls(None, None, 1)
        bounds = document_bounds(documents, most) if most is not None and documents.is_cuda else None
        return cls(documents, bounds, most)


LossFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


class Decoder(nn.Module):
    """A decoder-only language model by its description.

    ``embedding``, ``position_embedding``, ``norm`` and ``head`` may be set to None, and any of ``layers``, which are
    keyed by index, deleted: what is left maps hidden states to hidden states. Layers from ``model.layers`` on are
    prediction modules: they add to the loss and always read the embedding. ``loss_function`` takes hidden states, the
    head's weight and bias, labels and the weight of each label, so that it never has to hold all logits; it may be
    replaced.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        for part in not_built(model):  # what the decoder would silently get wrong
            raise SpecError(part.field, f"{part.reason} ({model.name})", part.remedy)
        self.model = model
        learned = model.positions == "learned"
        self.embedding: nn.Embedding | None = TokenEmbedding(model.vocab, model.hidden)
        self.position_embedding = nn.Embedding(model.max_seq, model.hidden) if learned else None
        layers = [Layer(model, moe=model.is_moe_layer(index)) for index in range(model.layers)]
        layers += [PredictionLayer(model) for _ in range(model.mtp_layers)]
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
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
        ahead: Ahead | None = None,
        token_keys: Tensor | None = None,
    ) -> Tensor:
        """The summed loss, logits or hidden states: whatever the last remaining part produces.

        ``inputs`` are token ids [batch, seq], or hidden states [batch, seq, hidden] without an embedding. ``labels``
        [batch, seq] are already shifted to the positions that predict them; -100 does not count. ``positions`` [batch
        or 1, seq] count from 0 along the row unless given. ``documents`` [batch, seq] number packed documents, which do
        not see each other; no row has more than ``most_documents`` (without this number a GPU takes a slower path).
        ``ahead`` is what prediction modules read and predict; it has to be given unless ``inputs`` are whole sequences
        of tokens. ``token_keys`` [batch, seq] are what dropout follows; without them nothing is dropped.
        """
        places = positions
        if places is None:
            places = torch.arange(inputs.shape[1], device=inputs.device)[None]
        layers = {int(index): layer for index, layer in self.layers.items()}
        modules = sum(index >= self.model.layers for index in layers)
        if labels is None or modules == 0:
            ahead = None
        elif ahead is None:
            ahead = ahead_of(inputs, labels, documents, modules)
        hidden, embedded = self._embed(inputs, places, ahead)
        rotation, windowed_rotation = self._rotations(places)
        packed = Packed.of(documents, most_documents)
        chunks = self._chunks(places, packed, whole=positions is None)
        softcap, scale = self.model.numerics.attention_softcap, attention_scale(self.model)
        growth, growing = query_growth(self.model, places), self.model.numerics.long_query_layers == "with-rope"

        def run(index: int, layer: nn.Module, states: Tensor, *more: Tensor) -> Tensor:
            record = self.model.every_layer[index]
            windowed = record.mixer == "window"
            window, (numbers, bounds, _) = self.model.sliding_window, chunks if record.mixer == "chunk" else packed
            keys = None if token_keys is None else keys_in_layer(token_keys, index)
            seen = (self.model.causal, window if windowed else None, scale, numbers, positions, bounds, softcap)
            factor = growth if record.rotary == growing else None
            arguments = AttentionArguments(*seen, query_factor=factor, token_keys=keys)
            turned = (windowed_rotation if windowed else rotation) if record.rotary else None
            result: Tensor = layer(states, turned, arguments, *more)
            return result

        for index, layer in layers.items():
            if index < self.model.layers:
                hidden = run(index, layer, hidden)
        if self.norm is not None:
            hidden = scaled(self.norm(hidden), self.model.numerics.logit_scale)
        if self.head is None:
            return hidden
        if labels is None:
            logits: Tensor = self.head(hidden)
            return softly_capped(logits, self.model.numerics.logit_softcap)
        if ahead is None:
            return self.loss_function(hidden, self.head.weight, self.head.bias, labels, None)
        predicted = [hidden]
        for number, token in enumerate(embedded):
            index = self.model.layers + number
            predicted.append(run(index, layers[index], predicted[-1], token))
        every, shares = ahead.with_labels(labels, self.model.numerics.prediction_loss)
        return self.loss_function(torch.cat(predicted), self.head.weight, self.head.bias, every, shares)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, each once, and its persistent buffers."""
        yield from self.named_parameters()
        kept = self.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.named_buffers() if name in kept)

    def _embed(self, inputs: Tensor, places: Tensor, ahead: Ahead | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of the inputs, and embeddings of the tokens ahead, by a single lookup."""
        ids = [] if inputs.is_floating_point() else [inputs]
        ids += [] if ahead is None else ahead.tokens.unbind(-1)
        embedded: tuple[Tensor, ...] = ()
        if ids and self.embedding is not None:
            rows = self.embedding(ids[0] if len(ids) == 1 else torch.cat(ids))
            embedded = scaled(rows, self.model.numerics.embedding_scale).chunk(len(ids))
        hidden, others = (inputs, embedded) if inputs.is_floating_point() else (embedded[0], embedded[1:])
        if self.position_embedding is None:
            return hidden, others
        if places.shape[1] > self.model.max_seq:
            problem = f"{places.shape[1]} tokens are more than the {self.model.max_seq} positions {self.model.name} has"
            raise SpecError("training.seq", problem, "use shorter sequences")
        return hidden + self.position_embedding(places), others

    def _chunks(self, places: Tensor, packed: Packed, *, whole: bool) -> Packed:
        """Chunks as documents within documents, which layers that attend to their own chunk see.

        ``places`` are of the tokens at hand, the last ones where a cache keeps others; ``whole``: from 0 on.
        """
        chunk, seq = self.model.attention_chunk, places.shape[1]
        if chunk is None or (whole and seq <= chunk):
            return packed
        numbers = places // chunk
        if packed.documents is not None:
            numbers = numbers + packed.documents[:, -seq:] * (LONGEST // chunk + 1)
        most = None if packed.most is None else packed.most + seq // chunk
        return Packed.of(numbers, most)

    def _rotations(self, places: Tensor) -> tuple[Rotation | None, Rotation | None]:
        """The rotation of layers that see all keys, and of those with a window."""
        if self.model.positions != "rope":
            return None, None
        everywhere = rotation_of(self.model, places)
        if self.model.numerics.windowed_rope_theta is None:
            return everywhere, everywhere
        return everywhere, rotation_of(self.model, places, windowed=True)


# -- The token embedding ---------------------------------------------------------------------------
# On a GPU its gradient is one pass over the gradients of the tokens. PyTorch's own takes several passes, each several
# times as long, and rounds every sum more than once. Where gradients are accumulated in fp32, ours is computed in fp32:
# a rounded gradient would have to be widened into a second tensor.


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` with that gradient."""

    def forward(self, input: Tensor) -> Tensor:
        if not kernels.run_on(input.device) or torch.compiler.is_compiling():
            return super().forward(input)
        rows: Tensor = _LookedUp.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        ctx.dtype = (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, summed_rows(gradient.flatten(0, -2), tokens.flatten(), ctx.rows, ctx.dtype)


def summed_rows(gradient: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """For each token of the vocabulary the sum of its rows of ``gradient`` [tokens, features], rounded at most once."""
    from shardwise.models.triton_kernels import FEATURES, ROW_WARPS, ROWS, row_sums

    ordered, order = tokens.sort(stable=True)
    sums = torch.zeros((vocabulary, gradient.shape[1]), dtype=dtype, device=gradient.device)
    features = gradient.shape[1]
    row_sums[(len(tokens), -(-features // FEATURES))](
        gradient.contiguous(), ordered, order, sums, len(tokens), features, ROWS, FEATURES, num_warps=ROW_WARPS
    )
    return sums


# -- Initial values of the parameters ------------------------------------------------------------
# Each comes from a generator of its own, so that none depends on which others are present. Normal with a standard
# deviation of 0.02 (GPT-2); for projections back into the hidden states it is divided by the square root of their
# number (arXiv 1909.08053 and GPT-2). Norms start by multiplying by one, biases are zero.

DEVIATION = 0.02
DRAWN_AT_ONCE = 2**26  # elements: fp32 values of a large embedding never lie whole beside a model that fills a GPU


@torch.no_grad()
def initialise(target: nn.Module | Iterable[tuple[str, Tensor]], seed: int, model: Model) -> None:
    """Fills a module (a `Decoder` or what is left of one) or named parameters in place; buffers become zero."""
    if isinstance(target, nn.Module):
        for buffer in target.buffers():
            buffer.zero_()
        target = target.named_parameters()
    for name, parameter in target:
        parameter.copy_(initial_value(name, parameter.shape, seed, model, parameter.dtype, parameter.device))


def initial_value(
    name: str,
    shape: Iterable[int],
    seed: int,
    model: Model,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: range | None = None,
) -> Tensor:
    """The whole initial value of one parameter, by its full name in a `Decoder`; the same on every call.

    ``experts`` selects some experts of a stacked parameter. Values are drawn on ``device`` and differ between kinds of
    devices.
    """
    size = tuple(shape)
    if model.tied_embeddings and name == "head.weight":
        name = "embedding.weight"  # where the two live apart they must still start equal
    if is_bias(name):
        return torch.zeros(_size_of(size, experts), dtype=dtype, device=device)
    if is_norm(name):
        value = 0.0 if model.numerics.norm_plus_one else 1.0
        return torch.full(size, value, dtype=dtype, device=device)
    if ".activation." in name:
        return torch.full(size, initial_curvature(name), dtype=dtype, device=device)
    deviation = DEVIATION / math.sqrt(2 * model.layers) if is_projection_back(name) else DEVIATION

    def draw(own: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{seed}:{own}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if is_of_adapter(name):
            return initial_adapter(name, shape, generator).to(dtype)
        return _normal(shape, deviation, dtype, generator)

    if not is_stack_of_experts(name):
        return draw(name, size)
    numbers = range(size[0]) if experts is None else experts
    result = torch.empty(_size_of(size, numbers), dtype=dtype, device=device)
    for place, number in enumerate(numbers):
        result[place] = draw(f"{name}[{number}]", size[1:])
    return result


def _normal(shape: tuple[int, ...], deviation: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=dtype, device=generator.device)
    for part in torch.split(values.view(-1), DRAWN_AT_ONCE):
        part.copy_(torch.empty(part.shape, device=part.device).normal_(std=deviation, generator=generator))
    return values


def is_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias"))


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_stack_of_experts(name: str) -> bool:
    return ".experts." in name


def is_projection_back(name: str) -> bool:
    """Whether a matrix's outputs are added to the hidden states."""
    return name.removesuffix(".weight").endswith((".output", ".down"))


def _size_of(shape: tuple[int, ...], experts: range | None) -> tuple[int, ...]:
    return shape if experts is None else (len(experts), *shape[1:])
