"""Token exchanges: how tokens reach experts on other ranks, and how the results come back.

- `FlatExchange`: one all-to-all; a token's row is sent once for each of its experts.
- `DeduplicatedExchange`: two levels, once to every node that needs a token and inside it once to every device, as in
  DeepSeek-V3 (arXiv 2412.19437, section 3.2.2). A row crosses the network to the device with the sender's place on the
  other node, which forwards it; results are summed on the device, then in the node, and one row goes back.
- `GatheredExchange`: no expert parallelism, every expert cut over ranks with different tokens (sequence parallelism).
- `SummedExchange` and `DividedExchange`: tensor parallelism without sequence parallelism, where all ranks of a group
  hold the same tokens; around any other exchange. Both take and give tokens, weights and gradients that are whole and
  equal on all ranks of the group, so that nothing outside has to be reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.autograd import same, with_gradient
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.experts.rows import (
    Assumed,
    Channel,
    Copies,
    HostCopy,
    RowsInFlight,
    Splits,
    collect,
    evenly,
    exchange_rows,
    gather_rows,
    in_pieces,
    inverse,
    masked_copies,
    return_rows,
    scatter_sum,
    some_sorted_copies,
    sorted_copies,
    spread,
)
from shardwise.engine.labels import Called, in_backward, sorting_name
from shardwise.engine.profiler_ranges import named, sent
from shardwise.layout.groups import expected_destinations
from shardwise.layout.pieces import EXCHANGED_CHUNKS
from shardwise.models.moe import Beside, GroupedExperts, Mixed, Multiply, TokenExchange, count_tokens, reorder_rows


@dataclass(frozen=True)
class FlatRoute:
    """The handle of a dispatch: where every row went, for the way back and both backward passes."""

    copies: Copies
    splits: Splits
    part_rows: tuple[int, ...]  # rows of each rank that splits the same experts
    by_expert: Tensor  # the order of received rows for the experts; `by_source` is its inverse
    by_source: Tensor
    counts: Tensor  # rows of each expert of this rank


class FlatExchange:
    """One all-to-all: rank i of ``ranks`` holds the i-th of equal runs of experts, each cut over the ranks ``parts``.

    The ranks of ``parts`` hold different tokens; these are gathered for the experts, and their results are summed.
    """

    def __init__(self, experts: int, ranks: Channel, parts: Channel) -> None:
        self.experts, self.ranks, self.parts = experts, ranks, parts
        self.local = experts // ranks.size
        self.assumed: Assumed | None = None
        self.traffic = ranks.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, FlatRoute]:
        with named(sorting_name("ep", Called.DISPATCH)):
            (route,) = self.routes([indices])
            arrived = exchange_rows(spread(rows, route.copies), self.ranks, route.splits, Called.DISPATCH)
            return self.arrived(arrived, route), route.counts, route

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: FlatRoute) -> Tensor:
        with named(sorting_name("ep", Called.COMBINE)):
            rows = return_rows(self.leaving(rows, handle), self.ranks, handle.splits, Called.COMBINE)
            return collect(rows, handle.copies, weights.flatten())

    def routes(self, chosen: Sequence[Tensor]) -> list[FlatRoute]:
        """Routes of several groups of tokens that are sent one by one, each by its ``chosen`` experts [tokens, k].

        The host waits once for all of them.
        """
        counted = [self._count(indices) for indices in chosen]
        hosts = [HostCopy(numbers) if self.assumed is None else self.assumed for _, numbers in counted]
        copies = [sorted_copies(indices) for indices in chosen]
        routes = []
        for indices, (arriving, _), host, copied in zip(chosen, counted, hosts, copies):
            splits, part_rows = self._sizes(host, indices.numel())
            blocks = arriving.view(-1, self.local)
            by_expert = _by_expert(blocks, sum(part_rows))
            routes.append(FlatRoute(copied, splits, part_rows, by_expert, inverse(by_expert), blocks.sum(0)))
        return routes

    def arrived(self, rows: Tensor, route: FlatRoute) -> Tensor:
        """Rows that have been received, as the experts take them."""
        rows = gather_rows(rows, self.parts, route.part_rows, Called.EXPERT_TOKENS)
        return reorder_rows(rows, route.by_expert, route.by_source) if self.local > 1 else rows

    def leaving(self, rows: Tensor, route: FlatRoute) -> Tensor:
        """The experts' rows, as they are sent back."""
        if self.local > 1:
            rows = reorder_rows(rows, route.by_source, route.by_expert)
        return scatter_sum(rows, self.parts, route.part_rows, Called.EXPERT_OUTPUTS)

    def _count(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows arrive [parts, ranks, local experts], and the numbers that the host needs."""
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
    """The permutation that sorts by expert rows that arrive sorted by source, and by expert within a source.

    ``blocks`` [sources, experts] counts the rows of each source for each expert; such a block moves as a whole.
    """
    ends = blocks.flatten().cumsum(0).view_as(blocks)
    now = (ends - blocks).T.flatten()  # where each block begins, listed expert by expert
    sizes = blocks.T.flatten()
    then = sizes.cumsum(0) - sizes
    moved = torch.repeat_interleave(now - then, sizes, output_size=total)
    return moved + torch.arange(total, device=blocks.device)


@dataclass(frozen=True)
class ExchangeLevel:
    """One level of an exchange: rows copied for the members of a channel that need them, and exchanged."""

    channel: Channel
    copies: Copies
    splits: Splits

    def out(self, rows: Tensor, what: str) -> Tensor:
        return exchange_rows(spread(rows, self.copies), self.channel, self.splits, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        return collect(return_rows(rows, self.channel, self.splits, what), self.copies)


@dataclass(frozen=True)
class HierarchicalRoute:
    """The handle of a dispatch over two levels."""

    levels: tuple[ExchangeLevel, ExchangeLevel]
    part_rows: tuple[int, ...]  # rows of each rank that splits the same experts
    copies: Copies  # of arrived rows, for the experts of this rank
    listed: Tensor  # which of the arrived choices [rows, k], flattened, are experts of this rank


# The row counts that the host needs: between nodes, between devices, of each rank of ``parts``, and of the experts.
_LevelSizes = tuple[Splits, Splits, tuple[int, ...], int]


class DeduplicatedExchange:
    """Two levels: a token is sent once to each node that has experts for it, and from there to the devices.

    Device d of node n holds run n · devices + d of equal runs of experts, each cut over the ranks of ``parts``.
    ``nodes`` connects the devices with this one's place on every node, ``devices`` those of this node. The ranks of
    ``parts`` hold different tokens; these are gathered for the experts, and their results are summed.
    """

    def __init__(self, experts: int, nodes: Channel, devices: Channel, parts: Channel) -> None:
        self.experts, self.nodes, self.devices, self.parts = experts, nodes, devices, parts
        self.local = experts // (nodes.size * devices.size)
        self.place = nodes.rank * devices.size + devices.rank
        self.assumed: Assumed | None = None
        self.traffic = nodes.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, HierarchicalRoute]:
        with named(sorting_name("ep", Called.DISPATCH)):
            wanted = self._wanted(indices, 0, self.nodes.size * self.devices.size)
            by_node = wanted.view(-1, self.nodes.size, self.devices.size).any(-1)
            counts, numbers = self._count(indices, wanted, by_node)
            assumed = self.assumed
            sizes = self._read(HostCopy(numbers)) if assumed is None else self._assume(assumed, *indices.shape)
            of_nodes, of_devices, part_rows, expert_rows = sizes
            outer = ExchangeLevel(self.nodes, masked_copies(by_node, sum(of_nodes.send)), of_nodes)
            rows, chosen = outer.out(rows, Called.DISPATCH), outer.out(indices.int(), Called.CHOICES)
            wanted = self._wanted(chosen, self.nodes.rank * self.devices.size, self.devices.size)
            inner = ExchangeLevel(self.devices, masked_copies(wanted, sum(of_devices.send)), of_devices)
            rows, chosen = inner.out(rows, Called.DISPATCH), inner.out(chosen, Called.CHOICES)
            rows = gather_rows(rows, self.parts, part_rows, Called.EXPERT_TOKENS)
            chosen = gather_rows(chosen, self.parts, part_rows, Called.CHOICES)
            here = chosen // self.local == self.place
            copies, listed = some_sorted_copies(chosen % self.local, here, expert_rows)
            return spread(rows, copies), counts, HierarchicalRoute((outer, inner), part_rows, copies, listed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, rows: Tensor, weights: Tensor, handle: HierarchicalRoute) -> Tensor:
        outer, inner = handle.levels
        with named(sorting_name("ep", Called.COMBINE)):
            weights = inner.out(outer.out(weights, Called.ROUTER_WEIGHTS), Called.ROUTER_WEIGHTS)
            weights = gather_rows(weights, self.parts, handle.part_rows, Called.ROUTER_WEIGHTS).flatten()
            rows = collect(rows, handle.copies, weights.index_select(0, handle.listed))
            rows = scatter_sum(rows, self.parts, handle.part_rows, Called.EXPERT_OUTPUTS)
            return outer.back(inner.back(rows, Called.COMBINE), Called.COMBINE)

    def _wanted(self, indices: Tensor, first: int, devices: int) -> Tensor:
        """[rows, devices]: whether any of a row's experts is on each of ``devices`` devices from ``first`` on."""
        place = indices // self.local - first
        place = place.masked_fill((place < 0) | (place >= devices), devices).long()
        mask = torch.zeros(indices.shape[0], devices + 1, dtype=torch.bool, device=indices.device)
        return mask.scatter_(1, place, True)[:, :devices]

    def _count(self, indices: Tensor, wanted: Tensor, by_node: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows each local expert gets, and the numbers that the host needs.

        A sender knows where its rows go on every node, so the counts of both levels are sent together, in advance.
        """
        nodes, devices, local = self.nodes.size, self.devices.size, self.local
        per_expert = count_tokens(indices.reshape(1, -1), self.experts).view(nodes, -1)
        leaving = torch.cat([by_node.sum(0)[:, None], wanted.sum(0).view(nodes, devices), per_expert], 1)
        arriving = self.nodes.exchange(leaving, [1] * nodes, [1] * nodes, Called.COUNTS)
        onward = arriving[:, 1:].sum(0)
        to_device, for_experts = onward[:devices], onward[devices:].view(devices, local)
        forwarded = torch.cat([to_device[:, None], for_experts], 1)
        here = self.devices.exchange(forwarded, [1] * devices, [1] * devices, Called.COUNTS)
        split = gather_rows(here.sum(0)[None], self.parts, [1] * self.parts.size, Called.COUNTS)
        counts = split[:, 1:].sum(0)
        numbers = [leaving[:, 0], arriving[:, 0], to_device, here[:, 0], split[:, 0], counts.sum()[None]]
        return counts, torch.cat(numbers)

    def _read(self, numbers: HostCopy) -> _LevelSizes:
        nodes, devices = self.nodes.size, self.devices.size
        lengths = (nodes, nodes, devices, devices, self.parts.size, 1)
        out, back, forwarded, arrived, part_rows, (total,) = in_pieces(numbers.read(), *lengths)
        return Splits(out, back), Splits(forwarded, arrived), part_rows, total

    def _assume(self, assumed: Assumed, tokens: int, top_k: int) -> _LevelSizes:
        nodes, devices, skew = self.nodes.size, self.devices.size, assumed.skew
        visited = expected_destinations(self.experts, nodes, top_k, assumed.nodes)
        out, back = evenly(tokens * visited, nodes), evenly(tokens * visited * skew, nodes)
        forwarded = tokens * expected_destinations(self.experts, nodes * devices, top_k)
        inside = Splits(evenly(forwarded, devices), evenly(forwarded * skew, devices))
        part_rows = (sum(inside.receive),) * self.parts.size
        total = round(tokens * top_k * skew) * self.parts.size
        return Splits(out, back), inside, part_rows, total


GatheredHandle = tuple[Copies, tuple[int, ...]]  # the copies made for the experts; the rows of each rank


class GatheredExchange:
    """Every rank of ``parts`` holds a part of all experts.

    Tokens are gathered *before* they are copied for their experts and results are summed before they are sent, which is
    1/top-k of the bytes. Nothing waits for the host.
    """

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
    """Every expert is cut over the ranks of ``parts``, which hold the same tokens; their results are summed."""

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
    """Whole experts; each rank of ``holders``, which all hold the same tokens, sends its share of them.

    So no token is computed twice, and an expert's gradient is still the sum over all ranks that hold it.
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


# -- Tokens exchanged in chunks, each while another is computed (``overlap.ep``) --------------------------------------
# The first chunk is sent while the shared expert computes, each later one while the experts compute the one before it.
# The results of a chunk return while the next chunk is computed. The backward pass is the mirror image.


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
