"""A plain decoder of a few numbers: `model: {params: 13B, layers: 40, hidden: 5120}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.spec import presets
from shardwise.spec.codec import Spec, count, quantity
from shardwise.spec.errors import SpecError
from shardwise.spec.layers import MOST_HEADS, MOST_LAYERS, WIDEST
from shardwise.spec.model import Model
from shardwise.spec.units import readable_count

VOCAB = 32_000
_EVEN = 64  # features of an MLP of which only parameters are known: a multiple, for tensor parallelism
_HEAD_SIZES = (128, 64, 96, 80, 32, 16)  # as wide as most, then as others


@dataclass(frozen=True, kw_only=True)
class BareModel(Spec):
    """What stands for a model of which little is known: MLPs are as wide as its parameters allow."""

    params: float = quantity("count")
    """Parameters, such as 70e9 or 70B."""
    layers: int = count(maximum=MOST_LAYERS)
    """Transformer layers."""
    hidden: int = count(maximum=WIDEST)
    """Features of the hidden states."""
    heads: int | None = count(None, maximum=MOST_HEADS)
    """Query heads; by default of 128 features, or of fewer that divide `hidden`."""
    kv_heads: int | None = count(None, maximum=MOST_HEADS)
    """Key-value heads; by default as many as query heads."""
    vocab: int = count(VOCAB, maximum=2**30)
    """Tokens of the vocabulary."""

    @property
    def model(self) -> Model:
        """The decoder; raises SpecError if it has too few parameters for its layers."""
        heads = self.heads or usual_heads(self.hidden)
        outline = bare_decoder(self.layers, self.hidden, heads, self.kv_heads or heads, 1, self.vocab)
        width = width_for(round(self.params), outline, _EVEN, "params")
        return bare_decoder(self.layers, self.hidden, heads, self.kv_heads or heads, width, self.vocab)

    @property
    def notes(self) -> list[str]:
        """What is assumed, in one line."""
        return assumed_notes(self.model, heads=self.heads, vocab=None if self.vocab == VOCAB else self.vocab)


def model_of(value: Any) -> Model:
    """The model that a field of a job means: a preset or a file, its fields, or the few numbers of a `BareModel`."""
    if isinstance(value, Mapping) and "params" in value:
        return BareModel.from_dict(value).model
    return presets.resolve("model", Model, value)


def usual_heads(hidden: int) -> int:
    """Query heads of the usual size."""
    size = next((size for size in _HEAD_SIZES if hidden % size == 0), 1)
    return min(hidden // size, MOST_HEADS) if size > 1 else 1


def bare_decoder(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Model:
    return Model(name="bare numbers", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
                 vocab=vocab, norm="rmsnorm", activation="gelu")  # fmt: skip


def width_for(parameters: int, outline: Model, multiple: int, field: str) -> int:
    """The MLP width (of two matrices), a multiple, with which the outlined model has ``parameters``."""
    layers, hidden = outline.layers, outline.hidden
    attention = sum(matrix.parameters for matrix in outline.attention_matrices)
    left = (parameters - 2 * outline.vocab * hidden - hidden) / layers - attention - 2 * hidden
    width = round(left / (2 * hidden) / multiple) * multiple
    if width < 1:
        least = layers * (attention + 2 * hidden) + 2 * outline.vocab * hidden + hidden
        raise SpecError(field, f"{parameters:,} is too few for these layers", f"they need more than {least:,}")
    return width


def assumed_notes(model: Model, *, heads: object, vocab: object, ffn: object = None) -> list[str]:
    """A note of what bare numbers leave out; none where they give the heads."""
    if heads is not None:
        return []
    words = [f"{model.heads} heads of {model.head_size} features (--heads)"]
    words += [f"MLPs of two matrices of {model.ffn:,} features"] if ffn is None else []
    words += [f"{readable_count(model.vocab)} tokens in the vocabulary (--vocab)"] if vocab is None else []
    return [f"assumed: {', '.join(words)}"]
