"""Generates a batch of prompts, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.generation.request import Generated, GenerationRequest, Sampling
from shardwise.models import AttentionArguments, Decoder
from shardwise.models.attention import Attention, MultiHeadLatentAttention, Rotation, rotate
from shardwise.models.dot_product import attention_from, dot_product_attention
from shardwise.models.loss import softly_capped

# -- keys and values of earlier tokens, kept between calls of a decoder ------------------------------
# The decoder is the one that is trained: a cache replaces ``attend`` of its attention modules, and ``expand`` of latent
# ones, and restores both at the end.

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
    """``attend`` of an attention module, with the keys and values of earlier tokens.

    With ``chunks`` it also keeps the number of each token's chunk: a call brings those of its own tokens.
    """

    def __init__(self, span: int | None, *, chunks: bool = False) -> None:
        self.keys, self.values = Columns(span), Columns(span)
        self.numbers = Columns(span) if chunks else None

    def keep_rows(self, rows: Tensor) -> None:
        for columns in (self.keys, self.values, self.numbers):
            if columns is not None:
                columns.keep_rows(rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        keys, values = self.keys.append(key), self.values.append(value)
        if self.numbers is not None and arguments.documents is not None:
            own = arguments.documents.expand(key.shape[0], -1)[..., None, None]
            arguments = replace(arguments, documents=self.numbers.append(own)[..., 0, 0])
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
            module, mixer = layer.attention, decoder.model.every_layer[int(index)].mixer
            span = decoder.model.span_of(mixer)
            if isinstance(module, MultiHeadLatentAttention):
                self.layers[module] = CachedLatentAttention(module, span)
            else:
                assert isinstance(module, Attention)
                self.layers[module] = CachedAttention(span, chunks=mixer == "chunk")

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


# -- a batch, token by token -------------------------------------------------------------------------

_SEEDS = 2**63 - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that neighbouring prompts have seeds far apart


def random_numbers(sampling: Sampling, number: int) -> torch.Generator:
    """The random numbers of a prompt, by its place among all prompts."""
    return torch.Generator().manual_seed((sampling.seed + _STRIDE * (number + 1)) % _SEEDS)


def next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token of every row, [rows], from ``logits`` [rows, vocabulary]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    drawn = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    likely, order = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        likely, order = likely[:, : sampling.top_k], order[:, : sampling.top_k]
    probabilities = likely.softmax(-1)
    sums = probabilities.cumsum(-1)
    if sampling.top_p is not None:
        inside = sums - probabilities < sampling.top_p  # the token that reaches it stays
        sums = torch.where(inside, sums, (probabilities * inside).sum(-1, keepdim=True))
    # The first token whose cumulative sum exceeds the number drawn; rounding never leads beyond the last.
    wanted = drawn.to(sums.device)[:, None] * sums[:, -1:]
    place = (sums <= wanted).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    chosen: Tensor = order.gather(1, place)[:, 0]
    return chosen


# -- one batch -----------------------------------------------------------------------------------------


Agree = Callable[[Tensor], Tensor]


class NextToken:
    """A decoder whose head reads only the last token: the logits of a long prompt would exceed the weights.

    ``agree`` replaces the tokens that this rank chose by those on which all ranks agree.
    """

    def __init__(self, decoder: Decoder, agree: Agree = lambda chosen: chosen) -> None:
        assert decoder.head is not None
        self.head: nn.Module = decoder.head
        decoder.head = None
        self.decoder, self.agree = decoder, agree
        self.device = self.head.weight.device

    def same_number(self, number: int) -> int:
        """The first rank's number, on all ranks."""
        return int(self.agree(torch.tensor([number]))[0])

    def logits(self, tokens: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        hidden = self.decoder(tokens, positions=positions, documents=real)
        logits: Tensor = self.head(hidden[:, -1])
        return softly_capped(logits, self.decoder.model.numerics.logit_softcap).float()


@dataclass
class _Rows:
    """The rows that are still being generated."""

    numbers: list[int]  # the prompt that each row belongs to
    tokens: Tensor  # behind padding
    positions: Tensor
    real: Tensor  # 1 for tokens, 0 for padding
    generators: list[torch.Generator]  # random numbers of each row

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], generators: list[torch.Generator], device: torch.device) -> _Rows:
        """Aligns prompts at their ends; padding before the shorter ones is seen by no token."""
        longest = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        positions = torch.arange(longest, device=device)[None] - (longest - lengths)[:, None]
        tokens = torch.tensor(padded, device=device)
        return cls(list(range(len(prompts))), tokens, positions.clamp(min=0), (positions >= 0).long(), generators)

    @torch.inference_mode()
    def append(self, chosen: Tensor) -> None:
        self.tokens = torch.cat((self.tokens, chosen[:, None]), 1)
        self.positions = torch.cat((self.positions, self.positions[:, -1:] + 1), 1)
        self.real = F.pad(self.real, (0, 1), value=1)

    @torch.inference_mode()
    def keep(self, places: list[int]) -> Tensor:
        rows = torch.tensor(places, device=self.tokens.device)
        self.numbers, self.generators = (
            [self.numbers[place] for place in places],
            [self.generators[place] for place in places],
        )
        self.tokens, self.positions, self.real = self.tokens[rows], self.positions[rows], self.real[rows]
        return rows


def generated_tokens(
    model: NextToken, prompts: Sequence[Sequence[int]], request: GenerationRequest, first_number: int = 0
) -> Iterator[dict[int, int]]:
    """Step by step, the next token of each prompt that has not ended, by its place in ``prompts``.

    ``first_number`` is the place of the first prompt among all.
    """
    generators = [random_numbers(request.sampling, first_number + number) for number in range(len(prompts))]
    rows = _Rows.of(prompts, generators, model.device)
    padded = not bool(rows.real.all())
    ended: set[int] = set()
    with cached(model.decoder) if request.cache else nullcontext() as cache:
        new = rows.tokens.shape[1]
        for _ in range(request.max_new_tokens):
            with torch.inference_mode():  # not across the yield
                logits = model.logits(rows.tokens[:, -new:], rows.positions[:, -new:], rows.real if padded else None)
                chosen = model.agree(next_tokens(logits, request.sampling, rows.generators))
            step = {number: token for number, token in zip(rows.numbers, chosen.tolist()) if number not in ended}
            yield step
            ended |= {number for number, token in step.items() if token in request.stop}
            if len(ended) == len(prompts):
                return
            rows.append(chosen)
            going = [place for place, number in enumerate(rows.numbers) if number not in ended]
            if 2 * len(going) <= len(rows.numbers):  # most rows would be computed in vain
                kept = rows.keep(going)
                if cache is not None:
                    cache.keep_rows(kept)
            new = 1 if request.cache else rows.tokens.shape[1]


class Collected:
    """The tokens of a batch so far."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = [tuple(prompt) for prompt in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]

    def add(self, step: dict[int, int]) -> None:
        for number, token in step.items():
            self.tokens[number].append(token)

    def results(self, stop: tuple[int, ...]) -> list[Generated]:
        return [
            Generated(prompt, tuple(tokens), bool(tokens) and tokens[-1] in stop)
            for prompt, tokens in zip(self.prompts, self.tokens)
        ]
