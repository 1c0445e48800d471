"""Keys and values of earlier tokens, kept between calls of a decoder.

The decoder is the one that is trained: a cache replaces ``attend`` of its attention modules, and ``expand`` of latent
ones, and restores both at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.models import AttentionArguments, Decoder
from shardwise.models.attention import Attention, MultiHeadLatentAttention
from shardwise.models.dot_product import attention_from, dot_product_attention
from shardwise.models.layer import window_of
from shardwise.models.rope import Rotation, rotate

ROOM = 256  # tokens between two allocations, which copy less than attention reads in as many steps


class Columns:
    """What a layer keeps of every token, [batch, tokens, heads, features]; with a window, of its last tokens only.

    Heads come before tokens in memory, so that matmuls read it without a copy.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._kept: Tensor | None = None
        self._number = 0

    def append(self, new: Tensor) -> Tensor:
        """Adds ``new`` tokens; all that their queries may see, themselves last."""
        number = new.shape[1]
        if self._kept is None or self._number + number > self._kept.shape[2] or self._is_wasteful():
            self._kept = self._moved(new)
        self._kept[:, :, self._number : self._number + number] = new.transpose(1, 2)
        self._number += number
        seen = self._number if self._window is None else min(self._number, self._window - 1 + number)
        return self._kept[:, :, self._number - seen : self._number].transpose(1, 2)

    def keep_rows(self, rows: Tensor) -> None:
        """Drops the other rows of the batch."""
        if self._kept is not None:
            self._kept = self._kept.index_select(0, rows)

    def _is_wasteful(self) -> bool:
        """Whether a long prompt filled more than the window will ever need."""
        return self._window is not None and self._number > self._window + ROOM

    def _moved(self, new: Tensor) -> Tensor:
        """A larger tensor with what later queries may still see."""
        batch, number, heads, features = new.shape
        kept = self._number if self._window is None else min(self._number, self._window - 1)
        moved = new.new_empty((batch, heads, kept + number + ROOM, features))
        if self._kept is not None:
            moved[:, :, :kept] = self._kept[:, :, self._number - kept : self._number]
        self._number = kept
        return moved


class CachedAttention:
    """``attend`` of an attention module, with the keys and values of earlier tokens."""

    def __init__(self, window: int | None) -> None:
        self.keys, self.values = Columns(window), Columns(window)

    def keep_rows(self, rows: Tensor) -> None:
        self.keys.keep_rows(rows)
        self.values.keep_rows(rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        keys, values = self.keys.append(key), self.values.append(value)
        if keys.shape[1] == key.shape[1]:
            return dot_product_attention(query, key, value, arguments)
        return attention_to(keys, values, query, arguments)


class CachedLatentAttention:
    """The same for latent attention, which keeps the latent vector and the rotated key that all heads share.

    Later queries are projected into the latent space, and the results back, instead of expanding every kept vector to
    the keys and values of all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """

    def __init__(self, module: MultiHeadLatentAttention, window: int | None) -> None:
        self.module = module
        self.columns = Columns(window)
        self.expand_all = module.expand

    def keep_rows(self, rows: Tensor) -> None:
        self.columns.keep_rows(rows)

    def expand(
        self, queries: Tensor, latent: Tensor, key_rotated: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = key_rotated.unsqueeze(-2)
        rotated = shared if rotation is None else rotate(shared, rotation)
        kept = self.columns.append(torch.cat((latent.unsqueeze(-2), rotated), -1))
        if kept.shape[1] == latent.shape[1]:
            return self.expand_all(queries, latent, key_rotated, rotation)
        plain, query_rotated = self.module.query_parts(queries)
        if rotation is not None:
            query_rotated = rotate(query_rotated, rotation)
        of_keys, _ = self._up_projections()
        carried = torch.einsum("bshp,hpl->bshl", plain, of_keys)
        return torch.cat((carried, query_rotated), -1), kept, kept[..., : self.module.latent_size]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        if key.shape[1] == query.shape[1]:
            return dot_product_attention(query, key, value, arguments)
        _, of_values = self._up_projections()
        return torch.einsum("bshl,hvl->bshv", attention_to(key, value, query, arguments), of_values)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """From latent vectors to each head's key and value: [heads, features, latent]."""
        sizes = (self.module.plain_size, self.module.value_size)
        of_keys, of_values = torch.unflatten(self.module.key_value_up.weight, 0, (-1, sum(sizes))).split_with_sizes(
            sizes, 1
        )
        return of_keys, of_values


def attention_to(keys: Tensor, values: Tensor, query: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention of the last tokens to those kept; ``documents`` covers all tokens so far."""
    kept = keys.shape[1]
    if arguments.documents is not None:
        arguments = replace(arguments, documents=arguments.documents[:, -kept:])
    return attention_from(query, keys, values, arguments, kept - query.shape[1])


class KeyValueCache:
    """The caches of all layers, by module."""

    def __init__(self, decoder: Decoder) -> None:
        self.layers: dict[Attention | MultiHeadLatentAttention, CachedAttention | CachedLatentAttention] = {}
        for index, layer in decoder.layers.items():
            module, window = layer.attention, window_of(decoder.model, int(index))
            if isinstance(module, MultiHeadLatentAttention):
                self.layers[module] = CachedLatentAttention(module, window)
            else:
                assert isinstance(module, Attention)
                self.layers[module] = CachedAttention(window)

    @torch.inference_mode()
    def keep_rows(self, rows: Tensor) -> None:
        for layer in self.layers.values():
            layer.keep_rows(rows)


@contextmanager
def cached(decoder: Decoder) -> Iterator[KeyValueCache]:
    """Gives the decoder an empty cache: each call then reads the tokens that follow those of the previous call."""
    cache = KeyValueCache(decoder)
    before = [(module, module.attend) for module in cache.layers]
    try:
        for module, layer in cache.layers.items():
            module.attend = layer.attend
            if isinstance(layer, CachedLatentAttention):
                module.expand = layer.expand  # type: ignore[method-assign]
        yield cache
    finally:
        for module, attend in before:
            module.attend = attend
            module.__dict__.pop("expand", None)
