"""The next token of every row of a batch, from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.generation.request import Sampling

_SEEDS = 2**63 - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that neighbouring prompts have seeds far apart


def random_numbers(sampling: Sampling, number: int) -> torch.Generator:
    """Those of one prompt, by its place among all prompts."""
    return torch.Generator().manual_seed((sampling.seed + _STRIDE * (number + 1)) % _SEEDS)


def next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """[rows] of ``logits`` [rows, vocabulary]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    drawn = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    likely, order = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        likely, order = likely[:, : sampling.top_k], order[:, : sampling.top_k]
    probabilities = likely.softmax(-1)
    sums = probabilities.cumsum(-1)
    if sampling.top_p is not None:
        inside = sums - probabilities < sampling.top_p  # the first that reaches it stays
        sums = torch.where(inside, sums, (probabilities * inside).sum(-1, keepdim=True))
    # The first whose sum exceeds the number drawn, out of all that stays; rounding never leads beyond the last.
    wanted = drawn.to(sums.device)[:, None] * sums[:, -1:]
    place = (sums <= wanted).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    chosen: Tensor = order.gather(1, place)[:, 0]
    return chosen
