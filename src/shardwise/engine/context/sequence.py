"""Which tokens of a sequence a context-parallel rank holds.

- ring and all-gather: of 2·cp equal chunks, rank r holds chunks r and 2·cp−1−r (zig-zag). Under a causal mask a token
  sees all before it, so that a cheap early and an expensive late chunk balance the work of every rank. Without a mask
  any cut is balanced, and this one no worse than another: one rule for all models.
- ulysses: one contiguous piece each. Attention runs on whole sequences by heads, so there is nothing to balance, and
  the exchanged pieces stand in the order of time as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError

SEQUENCE = 1  # dimension of [batch, sequence, ...]
ZIGZAG = ("ring", "all-gather")


def check_sequence(seq: int, size: int, method: str) -> None:
    """Refuses a sequence that does not divide into the chunks that the method needs."""
    chunks = 2 * size if method in ZIGZAG else size
    if size > 1 and seq % chunks:
        raise SpecError(
            "strategy.cp",
            f"{size} with {method} cuts sequences of {seq} tokens into {chunks} equal chunks",
            f"use a multiple of {chunks} as training.seq",
        )


def cut_sequence(tensor: Tensor, rank: int, size: int, method: str) -> Tensor:
    """The part [batch, local sequence, ...] of ``tensor`` [batch, sequence, ...] that belongs to ``rank``."""
    if size == 1:
        return tensor
    check_sequence(tensor.shape[SEQUENCE], size, method)
    if method not in ZIGZAG:
        return tensor.chunk(size, SEQUENCE)[rank].contiguous()
    chunks = tensor.chunk(2 * size, SEQUENCE)
    return torch.cat([chunks[rank], chunks[-1 - rank]], SEQUENCE)


def join_sequence(parts: Sequence[Tensor], method: str) -> Tensor:
    """The whole sequence from the parts of all ranks, in the order of the ranks."""
    if method not in ZIGZAG:
        return torch.cat(list(parts), SEQUENCE)
    early, late = zip(*(part.chunk(2, SEQUENCE) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], SEQUENCE)
