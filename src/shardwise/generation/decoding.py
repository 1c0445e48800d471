"""Generates a batch of prompts, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.generation.cache import cached
from shardwise.generation.request import Generated, GenerationRequest, Sampling
from shardwise.models import Decoder
from shardwise.models.entropy import softly_capped

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


def _alone(chosen: Tensor) -> Tensor:
    return chosen


class NextToken:
    """A decoder whose head reads only the last token: the logits of a long prompt would exceed the weights.

    ``agree`` replaces the tokens that this rank chose by those on which all ranks agree.
    """

    def __init__(self, decoder: Decoder, agree: Agree = _alone) -> None:
        assert decoder.head is not None
        self.head: nn.Module = decoder.head
        decoder.head = None
        self.decoder, self.agree = decoder, agree
        self.device = self.head.weight.device

    def same_number(self, number: int) -> int:
        """The first rank's number, on all ranks."""
        return int(self.agree(torch.tensor([number]))[0])

    def logits(self, tokens: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        """Logits of the next token, [rows, vocabulary]."""
        hidden = self.decoder(tokens, positions=positions, documents=real)
        logits: Tensor = self.head(hidden[:, -1])
        return softly_capped(logits, self.decoder.model.numerics.logit_softcap).float()


@dataclass
class _Rows:
    """The rows that are still being generated."""

    numbers: list[int]
    """The prompt that each row belongs to."""
    tokens: Tensor
    """Behind padding."""
    positions: Tensor
    real: Tensor
    """1 for tokens, 0 for padding."""
    generators: list[torch.Generator]
    """Random numbers of each row."""

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
