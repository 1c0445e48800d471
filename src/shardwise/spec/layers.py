"""A layer of a model as data: what mixes its tokens, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, repeat
from typing import Literal

from shardwise.spec.codec import Spec, count

MOST_LAYERS = 2048  # far beyond any model: more is a mistake, and would keep a search busy for ever
WIDEST, MOST_HEADS, LONGEST = 2**24, 2**16, 2**30  # as far

Mixer = Literal["full", "window", "chunk"]


@dataclass(frozen=True, kw_only=True)
class LayerRecord(Spec):
    """A layer, or several equal ones in a row."""

    mixer: Mixer = "full"
    """Keys that a query attends to: all, the last `sliding_window`, or those of its own chunk of `attention_chunk`."""
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
