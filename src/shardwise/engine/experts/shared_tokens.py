"""Token exchanges for ranks that split an expert, or that hold the same tokens.

`GatheredExchange`: no expert parallelism, every expert cut over ranks with different tokens (sequence parallelism).
`SummedExchange` and `DividedExchange`: tensor parallelism without sequence parallelism, where all ranks of a group
hold the same tokens; around any other exchange. Both take and give tokens, weights and gradients that are whole and
equal on all ranks of the group, so that nothing outside has to be reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.engine.autograd import same, with_gradient
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.experts.channel import Channel, gather_rows, scatter_sum
from shardwise.engine.experts.loads import evenly
from shardwise.engine.experts.permute import Copies, collect, sorted_copies, spread
from shardwise.engine.labels import Called, in_backward, sorting_name
from shardwise.engine.profiler_ranges import named, sent
from shardwise.models.experts import TokenExchange, count_tokens

GatheredHandle = tuple[Copies, tuple[int, ...]]  # the copies made for the experts; the rows of each rank


class GatheredExchange:
    """All experts are here, each cut over the ranks of ``parts``: every rank's tokens are gathered *before* they are
    copied for their experts and summed after, a top-k-th of the bytes; nothing waits for the host."""

    def __init__(self, experts: int, parts: Channel) -> None:
        self.experts, self.parts, self.traffic = experts, parts, parts.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, GatheredHandle]:
        with named(sorting_name("expert_tp", Called.DISPATCH)):
            sizes = (rows.shape[0],) * self.parts.size
            rows = gather_rows(rows, self.parts, sizes, Called.EXPERT_TOKENS)
            indices = gather_rows(indices, self.parts, sizes, Called.CHOICES)
            copies = sorted_copies(indices)
            counts = count_tokens(indices.view(1, -1), self.experts)[0]
            return spread(rows, copies), counts, (copies, sizes)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: GatheredHandle) -> Tensor:
        copies, sizes = handle
        with named(sorting_name("expert_tp", Called.COMBINE)):
            weights = gather_rows(weights, self.parts, sizes, Called.ROUTER_WEIGHTS)
            rows = collect(rows, copies, weights.flatten())
            return scatter_sum(rows, self.parts, sizes, Called.EXPERT_OUTPUTS)


class SummedExchange:
    """Every expert is cut over the ranks of ``parts``, which all send the same tokens; their results are summed."""

    def __init__(self, inner: TokenExchange, parts: Channel) -> None:
        self.inner, self.parts, self.traffic = inner, parts, parts.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.inner.dispatch(self._gradient_summed(rows, Called.EXPERT_TOKENS), indices)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        combined = self.inner.combine(rows, self._gradient_summed(weights, Called.ROUTER_WEIGHTS), handle)
        return with_gradient(combined, lambda rows: _summed(rows, self.parts, Called.EXPERT_OUTPUTS), same)

    def _gradient_summed(self, rows: Tensor, what: str) -> Tensor:
        return with_gradient(rows, same, lambda gradient: _summed(gradient, self.parts, in_backward(what)))


class DividedExchange:
    """Whole experts: each rank of ``holders`` takes its share of the tokens that all of them hold.

    So no expert computes a token twice, and an expert's gradient is still the sum over all ranks that hold it.
    """

    def __init__(self, inner: TokenExchange, holders: Channel) -> None:
        self.inner, self.holders, self.traffic = inner, holders, holders.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.inner.dispatch(self._take(rows, Called.TOKEN_GRADIENTS), self._share(indices))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        sizes = evenly(weights.shape[0], self.holders.size)
        combined = self.inner.combine(rows, self._take(weights, Called.ROUTER_WEIGHT_GRADIENTS), handle)
        return with_gradient(
            combined,
            lambda rows: gather_rows(rows, self.holders, sizes, Called.EXPERT_OUTPUTS),
            lambda gradient: self._share(gradient).contiguous(),
        )

    def _take(self, rows: Tensor, what: str) -> Tensor:
        """This rank's share of rows that all ranks hold; in the backward pass the shares' gradients are gathered."""
        sizes = evenly(rows.shape[0], self.holders.size)
        return with_gradient(
            rows,
            lambda rows: self._share(rows).clone(),
            lambda gradient: gather_rows(gradient, self.holders, sizes, what),
        )

    def _share(self, rows: Tensor) -> Tensor:
        sizes, rank = evenly(rows.shape[0], self.holders.size), self.holders.rank
        return rows.narrow(0, sum(sizes[:rank]), sizes[rank])


def _summed(tensor: Tensor, channel: Channel, what: str) -> Tensor:
    assert channel.group is not None
    total = tensor.clone(memory_format=torch.contiguous_format)
    with sent(channel.dimension, what, total):
        all_reduce_sum(total, channel.group)
    return total
