"""Tokens to experts in two levels: once to every node that needs them, and inside it once to every device.

As in DeepSeek-V3 (arXiv 2412.19437, section 3.2.2): a row crosses the network to the device with the sender's place on
the other node, which forwards it; results are summed on the device, then in the node, and one row goes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.cost.traffic.expert import expected_destinations
from shardwise.engine.experts.channel import Channel, Splits, exchange_rows, gather_rows, return_rows, scatter_sum
from shardwise.engine.experts.loads import Assumed, HostCopy, evenly, in_pieces
from shardwise.engine.experts.permute import Copies, collect, masked_copies, some_sorted_copies, spread
from shardwise.engine.labels import Called, sorting_name
from shardwise.engine.profiler_ranges import named
from shardwise.models.experts import count_tokens


@dataclass(frozen=True)
class ExchangeLevel:
    """One level: rows copied for the members of a channel that need them, and exchanged."""

    channel: Channel
    copies: Copies
    splits: Splits

    def out(self, rows: Tensor, what: str) -> Tensor:
        return exchange_rows(spread(rows, self.copies), self.channel, self.splits, what)

    def back(self, rows: Tensor, what: str) -> Tensor:
        return collect(return_rows(rows, self.channel, self.splits, what), self.copies)


@dataclass(frozen=True)
class HierarchicalRoute:
    """The handle of a dispatch: both levels, the rows of the ranks that split the same experts, the last copies."""

    levels: tuple[ExchangeLevel, ExchangeLevel]
    part_rows: tuple[int, ...]
    copies: Copies
    listed: Tensor  # which of the arrived choices [rows, k] are experts of this rank, flattened


@dataclass(frozen=True)
class _LevelSizes:
    """The row counts that the host needs: of both levels, of each rank of ``parts``, and for the experts."""

    nodes: Splits
    devices: Splits
    part_rows: tuple[int, ...]
    expert_rows: int


class DeduplicatedExchange:
    """Device d of node n holds run n · devices + d of equal runs of consecutive experts, cut over ``parts``.

    ``nodes`` joins the devices that have this one's place on every node, ``devices`` those of this node. The ranks of
    ``parts`` hold different tokens, which are gathered for the experts and whose results are summed.
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
            sizes = (
                self._read(HostCopy(numbers)) if self.assumed is None else self._assume(self.assumed, *indices.shape)
            )
            outer = ExchangeLevel(self.nodes, masked_copies(by_node, sum(sizes.nodes.send)), sizes.nodes)
            rows, chosen = outer.out(rows, Called.DISPATCH), outer.out(indices.int(), Called.CHOICES)
            wanted = self._wanted(chosen, self.nodes.rank * self.devices.size, self.devices.size)
            inner = ExchangeLevel(self.devices, masked_copies(wanted, sum(sizes.devices.send)), sizes.devices)
            rows, chosen = inner.out(rows, Called.DISPATCH), inner.out(chosen, Called.CHOICES)
            rows = gather_rows(rows, self.parts, sizes.part_rows, Called.EXPERT_TOKENS)
            chosen = gather_rows(chosen, self.parts, sizes.part_rows, Called.CHOICES)
            here = chosen // self.local == self.place
            copies, listed = some_sorted_copies(chosen % self.local, here, sizes.expert_rows)
            return spread(rows, copies), counts, HierarchicalRoute((outer, inner), sizes.part_rows, copies, listed)

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
        """Rows of each local expert; and the numbers that the host needs.

        A sender knows where its rows go on every node, so the counts of all levels are sent together, in advance.
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
        return _LevelSizes(Splits(out, back), Splits(forwarded, arrived), part_rows, total)

    def _assume(self, assumed: Assumed, tokens: int, top_k: int) -> _LevelSizes:
        nodes, devices, skew = self.nodes.size, self.devices.size, assumed.skew
        visited = expected_destinations(self.experts, nodes, top_k, assumed.nodes)
        out, back = evenly(tokens * visited, nodes), evenly(tokens * visited * skew, nodes)
        forwarded = tokens * expected_destinations(self.experts, nodes * devices, top_k)
        inside = Splits(evenly(forwarded, devices), evenly(forwarded * skew, devices))
        part_rows = (sum(inside.receive),) * self.parts.size
        total = round(tokens * top_k * skew) * self.parts.size
        return _LevelSizes(Splits(out, back), inside, part_rows, total)
