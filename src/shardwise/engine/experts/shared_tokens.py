"""Experts where ranks do not simply hold different tokens of a whole expert each.

`GatheredExchange`: no expert parallelism, every expert cut over ranks with different tokens (sequence parallelism).
`SummedExchange` and `DividedExchange`: tensor parallelism without sequence parallelism, where all ranks of a group
hold the same tokens; around any other exchange. Both take and give tokens, weights and gradients that are whole and
equal on all ranks of the group, so that nothing outside has to be reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.experts.channel import Channel, ExchangedBytes, gather_rows, scatter_sum
from shardwise.engine.experts.permute import Copies, collect, sorted_copies, spread
from shardwise.engine.labels import Called, in_backward, sorting_name
from shardwise.engine.profiler_ranges import named, sent
from shardwise.models.experts import TokenExchange, count_tokens


@dataclass(frozen=True)
class Gathered:
    copies: Copies
    sizes: tuple[int, ...]


class GatheredExchange:
    """All experts are here, each cut over the ranks of ``parts``: every rank's tokens are gathered *before* they are
    copied for their experts and summed after, a top-k-th of the bytes; nothing waits for the host."""

    def __init__(self, experts: int, parts: Channel) -> None:
        self.experts, self.parts = experts, parts

    @property
    def traffic(self) -> ExchangedBytes:
        return self.parts.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Gathered]:
        with named(sorting_name("expert_tp", Called.DISPATCH)):
            sizes = (rows.shape[0],) * self.parts.size
            rows = gather_rows(rows, self.parts, sizes, Called.EXPERT_TOKENS)
            indices = gather_rows(indices, self.parts, sizes, Called.CHOICES)
            copies = sorted_copies(indices)
            counts = count_tokens(indices.view(1, -1), self.experts)[0]
            return spread(rows, copies), counts, Gathered(copies, sizes)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: Gathered) -> Tensor:
        with named(sorting_name("expert_tp", Called.COMBINE)):
            weights = gather_rows(weights, self.parts, handle.sizes, Called.ROUTER_WEIGHTS)
            rows = collect(rows, handle.copies, weights.flatten())
            return scatter_sum(rows, self.parts, handle.sizes, Called.EXPERT_OUTPUTS)


class SummedExchange:
    """Every expert is cut over the ranks of ``parts``, which all send the same tokens; their results are summed."""

    def __init__(self, inner: TokenExchange, parts: Channel) -> None:
        self.inner, self.parts = inner, parts

    @property
    def traffic(self) -> ExchangedBytes:
        return self.parts.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.inner.dispatch(_SumBackward.apply(rows, self.parts, in_backward(Called.EXPERT_TOKENS)), indices)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        weights = _SumBackward.apply(weights, self.parts, in_backward(Called.ROUTER_WEIGHTS))  # type: ignore[no-untyped-call]
        combined = self.inner.combine(rows, weights, handle)
        result: Tensor = _SumForward.apply(combined, self.parts, Called.EXPERT_OUTPUTS)  # type: ignore[no-untyped-call]
        return result


class DividedExchange:
    """Whole experts: each rank of ``same`` takes its share of the tokens that all of them hold.

    So no expert computes a token twice, and an expert's gradient is the sum over all ranks that hold it, as ever.
    """

    def __init__(self, inner: TokenExchange, same: Channel) -> None:
        self.inner, self.same = inner, same

    @property
    def traffic(self) -> ExchangedBytes:
        return self.same.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        sizes = self._sizes(rows.shape[0])
        own = rows.shape[0] * self.same.rank // self.same.size
        indices = indices.narrow(0, own, sizes[self.same.rank])
        return self.inner.dispatch(self._take(rows, sizes, Called.TOKEN_GRADIENTS), indices)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        sizes = self._sizes(weights.shape[0])
        combined = self.inner.combine(rows, self._take(weights, sizes, Called.ROUTER_WEIGHT_GRADIENTS), handle)
        result: Tensor = _Give.apply(combined, self.same, sizes, Called.EXPERT_OUTPUTS)  # type: ignore[no-untyped-call]
        return result

    def _sizes(self, tokens: int) -> tuple[int, ...]:
        size = self.same.size
        return tuple(tokens * (rank + 1) // size - tokens * rank // size for rank in range(size))

    def _take(self, rows: Tensor, sizes: tuple[int, ...], what: str) -> Tensor:
        result: Tensor = _Take.apply(rows, self.same, sizes, what)  # type: ignore[no-untyped-call]
        return result


def _own(rows: Tensor, channel: Channel, sizes: tuple[int, ...]) -> Tensor:
    return rows.narrow(0, sum(sizes[: channel.rank]), sizes[channel.rank])


def _summed(tensor: Tensor, channel: Channel, what: str) -> Tensor:
    assert channel.group is not None
    total = tensor.clone(memory_format=torch.contiguous_format)
    with sent(channel.dimension, what, total):
        all_reduce_sum(total, channel.group)
    return total


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, what: str) -> Tensor:
        return _summed(rows, channel, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, what: str) -> Tensor:
        ctx.arguments = (channel, what)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradient, *ctx.arguments), None, None


class _Take(torch.autograd.Function):
    """This rank's share of rows that all ranks hold; backward, the shares' gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, sizes: tuple[int, ...], what: str) -> Tensor:
        ctx.arguments = (channel, sizes, what)
        return _own(rows, channel, sizes).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_rows(gradient, *ctx.arguments), None, None, None


class _Give(torch.autograd.Function):
    """All ranks' shares; backward, each takes its share of the gradient that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, sizes: tuple[int, ...], what: str) -> Tensor:
        ctx.arguments = (channel, sizes)
        return gather_rows(rows, channel, sizes, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(gradient, *ctx.arguments).contiguous(), None, None, None
