"""Embedding, head and loss with the vocabulary cut over the ranks.

A vocabulary that does not divide is padded: rows beyond it are zero, are never looked up, and their logits are minus
infinity, so that they get neither probability nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.labels import Called
from shardwise.engine.parameters import HeldPart, keep
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.tensor.collectives import copy, gather, join, reduce, scatter
from shardwise.models.loss import differentiate_, statistics, summed_loss


@dataclass(frozen=True)
class Slice:
    """The token ids of one rank: ``width`` of them from ``start`` on."""

    vocabulary: int  # ids from here on do not exist: they are padding
    width: int
    start: int

    @classmethod
    def of(cls, vocabulary: int, rank: int, size: int) -> Slice:
        width = -(-vocabulary // size)
        return cls(vocabulary, width, rank * width)

    @property
    def present(self) -> int:
        return max(0, min(self.width, self.vocabulary - self.start))

    def part(self, shape: tuple[int, ...]) -> HeldPart:
        return HeldPart(shape).cut(0, self.start, self.start + self.width)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers in this slice, and whether the token is in it at all (else row 0)."""
        inside = (tokens >= self.start) & (tokens < self.start + self.present)
        return torch.where(inside, tokens - self.start, 0), inside


class CutEmbedding(nn.Module):
    """Looks up the rows held here; the sum over the ranks completes them."""

    def __init__(self, embedding: nn.Embedding, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.slice = Slice.of(embedding.num_embeddings, rank, group.size())
        self.weight = embedding.weight
        keep(self, "weight", self.slice.part(tuple(embedding.weight.shape)))
        self.group, self.join = group, scatter if sequence_parallel else reduce
        padding = embedding.padding_idx  # a row that learns nothing
        here = padding is not None and 0 <= padding - self.slice.start < self.slice.width
        self.padding = padding - self.slice.start if padding is not None and here else None
        # Gemma's, under its own name, by which `initialise` asks for it.
        scale = getattr(embedding, "embed_scale", None)
        self.embed_scale: Tensor | None
        self.register_buffer("embed_scale", None if scale is None else torch.as_tensor(scale), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, inside = self.slice.local(tokens)
        embedded = F.embedding(rows, self.weight, self.padding) * inside.unsqueeze(-1).to(self.weight.dtype)
        whole = self.join(embedded, self.group)
        return whole if self.embed_scale is None else whole * self.embed_scale.to(self.weight.dtype)


class CutHead(nn.Module):
    """The head for callers that want logits: all of them, on every rank. Training goes through `cut_loss` instead."""

    def __init__(self, head: nn.Linear, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.slice = Slice.of(head.out_features, rank, group.size())
        self.weight, self.bias = head.weight, head.bias
        keep(self, "weight", self.slice.part(tuple(head.weight.shape)))
        if head.bias is not None:
            keep(self, "bias", self.slice.part(tuple(head.bias.shape)))
        self.group, self.enter = group, gather if sequence_parallel else copy

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self.enter(hidden, self.group), self.weight, self.bias)
        return join(logits, self.group)[..., : self.slice.vocabulary]


Loss = Callable[..., Tensor]


def cut_loss(
    vocabulary: int, rank: int, group: dist.ProcessGroup, sequence_parallel: bool, softcap: float | None = None
) -> Loss:
    """The loss function of a model whose head is cut: the same sum on every rank."""
    own, enter = Slice.of(vocabulary, rank, group.size()), gather if sequence_parallel else copy

    def loss(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shares: Tensor | None = None
    ) -> Tensor:
        return summed_loss(enter(hidden, group), weight, bias, labels, shares, softcap, partial(_entropy, own, group))

    return loss


def _entropy(
    own: Slice, group: dist.ProcessGroup, logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None,
    differentiated: bool,
) -> Tensor:  # fmt: skip
    """For this rank's logits.

    Ranks exchange three numbers per token: the largest logit, the sum of exponentials and the logit of the label
    (Shoeybi et al. 2019, section 3).
    """
    row, inside = own.local(labels)
    column = torch.where(inside, row, -1)
    local_largest, exponentials, right = statistics(logits, column, own.present, softcap)
    largest = local_largest.clone()
    with sent("tp", Called.LARGEST_LOGITS, largest):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([exponentials * (local_largest - largest).exp(), (right - largest).where(inside, 0.0)])
    with sent("tp", Called.EXPONENTIALS, sums):
        dist.all_reduce(sums, group=group)
    if differentiated:
        differentiate_(logits, column, factors, largest, sums[0], own.present, softcap)
    return (sums[0].log() - sums[1]) * factors
