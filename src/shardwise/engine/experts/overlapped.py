"""Tokens exchanged in chunks, each while another is computed (``overlap.ep``), as `cost.traffic.expert` prices it.

The first chunk is sent while the shared expert computes, each later one while the experts compute the one before it.
The results of a chunk return while the next chunk is computed. The backward pass is the mirror image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.engine.experts.channel import RowsInFlight, Splits
from shardwise.engine.experts.exchanges import FlatExchange, FlatRoute
from shardwise.engine.experts.permute import collect, spread
from shardwise.engine.labels import Called, sorting_name
from shardwise.engine.profiler_ranges import named
from shardwise.layout.pieces import EXCHANGED_CHUNKS
from shardwise.models.experts import Beside, GroupedExperts, Mixed, Multiply


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mix_overlapped(
    exchange: FlatExchange, experts: GroupedExperts, rows: Tensor, indices: Tensor, weights: Tensor,
    beside: Beside | None,
) -> Mixed:  # fmt: skip
    """Replaces `mix_in_turn`: the same result, computed chunk by chunk."""
    with named(sorting_name("ep", Called.DISPATCH)):
        routes = exchange.routes(indices.tensor_split(EXCHANGED_CHUNKS))

    def work(rows: Tensor, multiply: Multiply) -> Mixed:
        parts = [_ExchangedChunk(exchange, *chunk) for chunk in zip(rows.tensor_split(EXCHANGED_CHUNKS), routes)]
        parts[0].send()
        shared = None if beside is None else beside()
        for part, following in zip(parts, (*parts[1:], None)):
            arrived = part.receive()
            if following is not None:
                following.send()
            part.give_back(multiply(arrived, part.route.counts))
        own = weights.tensor_split(EXCHANGED_CHUNKS)
        return torch.cat([part.mixed(some) for part, some in zip(parts, own)]), shared

    mixed: Mixed = experts(rows, work)
    return mixed


class _ExchangedChunk:
    """Some tokens on their way to their experts, and their results on the way back."""

    def __init__(self, exchange: FlatExchange, rows: Tensor, route: FlatRoute) -> None:
        self.exchange, self.rows, self.route = exchange, rows, route
        back = Splits(route.splits.receive, route.splits.send)
        self.out = RowsInFlight(exchange.ranks, route.splits, Called.DISPATCH)
        self.home = RowsInFlight(exchange.ranks, back, Called.COMBINE)

    def send(self) -> None:
        with named(sorting_name("ep", Called.DISPATCH)):
            self.rows = self.out.start(spread(self.rows, self.route.copies))

    def receive(self) -> Tensor:
        with named(sorting_name("ep", Called.DISPATCH)):
            return self.exchange.arrived(self.out.finish(self.rows), self.route)

    def give_back(self, rows: Tensor) -> None:
        with named(sorting_name("ep", Called.COMBINE)):
            self.rows = self.home.start(self.exchange.leaving(rows, self.route))

    def mixed(self, weights: Tensor) -> Tensor:
        with named(sorting_name("ep", Called.COMBINE)):
            return collect(self.home.finish(self.rows), self.route.copies, weights.flatten())
