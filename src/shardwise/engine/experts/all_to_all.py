"""Tokens to experts by one all-to-all: a token's row is sent once for each of its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.experts.channel import Channel, Splits, exchange_rows, gather_rows, return_rows, scatter_sum
from shardwise.engine.experts.loads import Assumed, HostCopy, evenly, in_pieces
from shardwise.engine.experts.permute import Copies, collect, inverse, sorted_copies, spread
from shardwise.engine.labels import Called, sorting_name
from shardwise.engine.profiler_ranges import named
from shardwise.models.experts import count_tokens, reorder_rows


@dataclass(frozen=True)
class FlatRoute:
    """The handle of a dispatch: where every row went, for the way back and both backward passes."""

    copies: Copies
    splits: Splits
    part_rows: tuple[int, ...]  # of each rank that splits the same experts
    by_expert: Tensor  # order of the rows for the experts, and back
    by_source: Tensor


class FlatExchange:
    """Rank i of ``ranks`` holds the i-th of equal runs of consecutive experts, cut over the ranks of ``parts``.

    The ranks of ``parts`` hold different tokens, which are gathered for the experts and whose results are summed.
    """

    def __init__(self, experts: int, ranks: Channel, parts: Channel) -> None:
        self.experts, self.ranks, self.parts = experts, ranks, parts
        self.local = experts // ranks.size
        self.assumed: Assumed | None = None
        self.traffic = ranks.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, FlatRoute]:
        with named(sorting_name("ep", Called.DISPATCH)):
            arriving, numbers = self._count(indices)
            host = HostCopy(numbers) if self.assumed is None else self.assumed
            copies = sorted_copies(indices)
            copied = spread(rows, copies)
            splits, part_rows = self._sizes(host, indices.numel())
            blocks = arriving.view(-1, self.local)
            by_expert = _by_expert(blocks, sum(part_rows))
            route = FlatRoute(copies, splits, part_rows, by_expert, inverse(by_expert))
            arrived = exchange_rows(copied, self.ranks, splits, Called.DISPATCH)
            arrived = gather_rows(arrived, self.parts, part_rows, Called.EXPERT_TOKENS)
            if self.local > 1:
                arrived = reorder_rows(arrived, route.by_expert, route.by_source)
            return arrived, blocks.sum(0), route

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: FlatRoute) -> Tensor:
        with named(sorting_name("ep", Called.COMBINE)):
            if self.local > 1:
                rows = reorder_rows(rows, handle.by_source, handle.by_expert)
            rows = scatter_sum(rows, self.parts, handle.part_rows, Called.EXPERT_OUTPUTS)
            rows = return_rows(rows, self.ranks, handle.splits, Called.COMBINE)
            return collect(rows, handle.copies, weights.flatten())

    def _count(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that arrive: [parts, ranks, local experts]; and the numbers that the host needs."""
        leaving = count_tokens(indices.reshape(1, -1), self.experts).view(self.ranks.size, self.local)
        ones = [1] * self.ranks.size
        arriving = self.ranks.exchange(leaving, ones, ones, Called.COUNTS)
        arriving = gather_rows(arriving[None], self.parts, [1] * self.parts.size, Called.COUNTS)
        sizes = arriving.sum(-1)
        return arriving, torch.cat([leaving.sum(1), sizes[self.parts.rank], sizes.sum(1)])

    def _sizes(self, host: HostCopy | Assumed, rows: int) -> tuple[Splits, tuple[int, ...]]:
        ranks, parts = self.ranks.size, self.parts.size
        if isinstance(host, Assumed):
            receive = evenly(rows * host.skew, ranks)
            return Splits(evenly(rows, ranks), receive), (sum(receive),) * parts
        send, received, part_rows = in_pieces(host.read(), ranks, ranks, parts)
        return Splits(send, received), part_rows


def _by_expert(blocks: Tensor, total: int) -> Tensor:
    """The permutation of rows from source by source, expert by expert in each, to expert by expert.

    ``blocks`` [sources, experts] counts the rows of each block. Nothing is sorted: a block moves as one.
    """
    ends = blocks.flatten().cumsum(0).view_as(blocks)
    now = (ends - blocks).T.flatten()  # where each block begins, listed expert by expert
    sizes = blocks.T.flatten()
    then = sizes.cumsum(0) - sizes
    moved = torch.repeat_interleave(now - then, sizes, output_size=total)
    return moved + torch.arange(total, device=blocks.device)
