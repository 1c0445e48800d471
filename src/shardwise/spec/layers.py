"""A layer of a model as data: what mixes its tokens, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, repeat
from typing import Literal

from shardwise.spec.codec import Spec, count
from shardwise.spec.errors import SpecError

MOST_LAYERS = 2048  # far beyond any model: more is a mistake, and would keep a search busy for ever
WIDEST, MOST_HEADS, LONGEST = 2**24, 2**16, 2**30  # as far

Mixer = Literal["full", "window", "chunk", "delta"]


@dataclass(frozen=True, kw_only=True)
class LayerRecord(Spec):
    """A layer, or several equal ones in a row."""

    mixer: Mixer = "full"
    """Keys that a query attends to: all, the last `sliding_window`, or those of its own chunk of `attention_chunk`; or
    `delta`, a gated delta net in place of attention."""
    rotary: bool = True
    """Queries and keys are rotated by their positions, in a model with rope."""
    feed_forward: Literal["dense", "mixture"] = "dense"
    """What follows attention: an MLP, or a mixture of experts."""
    repeat: int = count(1, maximum=MOST_LAYERS)
    """Number of such layers in a row."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head sizes."""

    kv_rank: int = count(maximum=WIDEST)
    """Features of the latent keys and values."""
    nope_dim: int = count(maximum=WIDEST)
    """Features of a query or key head that are not rotated."""
    rope_dim: int = count(maximum=WIDEST)
    """Features that rope rotates."""
    value_dim: int = count(maximum=WIDEST)
    """Features of a value head."""
    q_rank: int | None = count(None, maximum=WIDEST)
    """Features of the latent queries. None: queries are not compressed."""

    @property
    def narrow_features(self) -> int:
        """Latent features of a token: compressed queries, keys and values, and the rotated key."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim


DELTA_CHUNK = 64  # tokens whose updates of a state are made together (fla/ops/gated_delta_rule/chunk.py)


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Spec):
    """Gated delta net (Yang et al. 2024, arXiv 2412.06464): states that every token decays, corrects and reads."""

    key_heads: int = count(maximum=MOST_HEADS)
    """Heads of queries and of keys, each for several value heads."""
    value_heads: int = count(maximum=MOST_HEADS)
    """Value heads, each with a state of `key_dim` × `value_dim`."""
    key_dim: int = count(maximum=WIDEST)
    """Features of a query or key head."""
    value_dim: int = count(maximum=WIDEST)
    """Features of a value head."""
    convolved_tokens: int = count(4, maximum=WIDEST)
    """Tokens that the convolution of queries, keys and values reaches over, its own included."""

    def check(self) -> None:
        if self.value_heads % self.key_heads:
            raise SpecError("key_heads", f"{self.key_heads} does not divide {self.value_heads} value heads")

    @property
    def key_features(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def convolved_features(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_features + self.value_features

    @property
    def state_elements(self) -> int:
        """All states of a sequence; their size does not depend on its length."""
        return self.value_features * self.key_dim

    @property
    def head_flops(self) -> float:
        """Forward FLOPs of a token in the state of one head, in chunks (arXiv 2412.06464, section 3.3).

        Among a chunk's tokens: keys with keys, queries with keys, the triangular matrix with keys and with values, and
        scores with values. With the state: what it predicts of the values, what queries read, and its update.
        """
        among_tokens = DELTA_CHUNK * (3 * self.key_dim + 2 * self.value_dim)
        return 2.0 * (among_tokens + 3 * self.key_dim * self.value_dim)

    @property
    def convolution_flops(self) -> float:
        """Of a token."""
        return 2.0 * self.convolved_tokens * self.convolved_features


def layers_of_pattern(pattern: Sequence[LayerRecord], layers: int) -> tuple[LayerRecord, ...]:
    """Every layer, by a pattern that begins again until there are as many as ``layers``."""
    once = chain.from_iterable(repeat(replace(record, repeat=1), record.repeat) for record in pattern)
    return tuple(islice(cycle(once), layers))


def pattern_of_layers(layers: Sequence[LayerRecord]) -> tuple[LayerRecord, ...]:
    """The shortest pattern of these layers, with equal neighbours as one record."""
    period = next(
        length
        for length in range(1, len(layers) + 1)
        if all(layer == layers[index % length] for index, layer in enumerate(layers))
    )
    records: list[LayerRecord] = []
    for layer in layers[:period]:
        if records and replace(records[-1], repeat=1) == layer:
            records[-1] = replace(layer, repeat=records[-1].repeat + 1)
        else:
            records.append(layer)
    return tuple(records)
