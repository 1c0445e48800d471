"""Rows exchanged between the ranks of a group, forward and backward, and counted; which groups exchange tokens.

Unlike PyTorch's `all_to_all_single_autograd`, the backward pass has a name and a byte count too, nothing is copied into
a wrapper tensor, and gloo, NCCL and the fake backend behave alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.autograd import with_gradient
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.labels import in_backward
from shardwise.engine.mesh import Mesh, new_group, own
from shardwise.engine.profiler_ranges import Pending, sent, wait_for
from shardwise.spec.errors import SpecError


@dataclass
class ExchangedBytes:
    """Bytes that this rank has sent since the last `clear`, by what was sent."""

    between_nodes: dict[str, int] = field(default_factory=dict)
    inside_node: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.between_nodes.clear()
        self.inside_node.clear()


@dataclass(frozen=True)
class Channel:
    """A group of ranks as one of them sees it."""

    dimension: str
    group: dist.ProcessGroup | None
    """None: this rank alone."""
    away: tuple[bool, ...]
    """For each member, whether it is on another node."""
    traffic: ExchangedBytes

    @property
    def size(self) -> int:
        return len(self.away)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        """Sends ``send[i]`` rows to member i, in this order; returns ``receive[i]`` rows of each. No gradient."""
        if self.group is None or self.size == 1:
            return rows
        swap = partial(dist.all_to_all_single, output_split_sizes=list(receive), input_split_sizes=list(send))
        return self.run(swap, rows, sum(receive), send, what)

    def start(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> tuple[Tensor, Pending]:
        """`exchange` in the background: returns a result that is valid after the wait. ``rows`` are contiguous."""
        swap = partial(dist.all_to_all_single, output_split_sizes=list(receive), input_split_sizes=list(send))
        works: list[Pending] = []
        result = self.run(lambda *a, **k: works.append(swap(*a, **k, async_op=True)), rows, sum(receive), send, what)
        return result, works[0]

    def run(
        self, collective: Callable[..., Any], rows: Tensor, received: int, counts: Sequence[int], what: str
    ) -> Tensor:
        """Runs a collective that returns ``received`` rows; ``counts[i]`` rows to member i are added to the traffic."""
        size = rows.element_size() * prod(rows.shape[1:])
        for member, count in enumerate(counts):
            if member != self.rank:
                bytes_by_name = self.traffic.between_nodes if self.away[member] else self.traffic.inside_node
                bytes_by_name[what] = bytes_by_name.get(what, 0) + count * size
        result = rows.new_empty(received, *rows.shape[1:])
        with sent(self.dimension, what, rows):
            collective(result, rows.contiguous(), group=self.group)
        return result


@dataclass(frozen=True)
class Splits:
    """How many rows to send to and receive from each member of a channel; known on the host."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


def exchange_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """An all-to-all of rows, and of their gradients the other way."""
    there = partial(channel.exchange, send=splits.send, receive=splits.receive)
    back = partial(channel.exchange, send=splits.receive, receive=splits.send)
    return _both_ways(rows, channel, what, there, back)


class RowsInFlight:
    """An all-to-all of rows that overlaps with computation, and of their gradients the other way, which does too.

    `start` and `finish` are two functions to autograd: what lies between them in the forward pass is computed while the
    rows travel, and its gradients while theirs travel.
    """

    def __init__(self, channel: Channel, splits: Splits, what: str) -> None:
        self.channel, self.splits, self.what = channel, splits, what
        self._source: Tensor | None = None  # kept until it is sent
        self._coming: Tensor | None = None
        self._work: Pending | None = None
        self._called = what

    def start(self, rows: Tensor) -> Tensor:
        """The result to come, for `finish` alone."""
        result: Tensor = _StartRows.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def finish(self, coming: Tensor) -> Tensor:
        result: Tensor = _FinishRows.apply(coming, self)  # type: ignore[no-untyped-call]
        return result

    def leave(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], called: str) -> Tensor:
        self._source, self._called = rows.contiguous(), called
        self._coming, self._work = self.channel.start(self._source, send, receive, called)
        return self._coming

    def arrive(self) -> Tensor:
        wait_for(self._work, self.channel.dimension, self._called)
        assert self._coming is not None
        arrived, self._source, self._work, self._coming = self._coming, None, None, None
        return arrived


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowsInFlight) -> Tensor:
        ctx.flight = flight
        return flight.leave(rows, flight.splits.send, flight.splits.receive, flight.what)

    @staticmethod
    def backward(ctx: Any, sent_gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.arrive(), None


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, flight: RowsInFlight) -> Tensor:
        ctx.flight = flight
        flight.arrive()
        return coming.view_as(coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.leave(gradient, flight.splits.receive, flight.splits.send, in_backward(flight.what))
        return gradient, None  # only its shape matters: `_StartRows.backward` reads what arrives instead


def return_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """`exchange_rows` in the other direction: rows go back to where they came from."""
    return exchange_rows(rows, channel, Splits(splits.receive, splits.send), what)


def gather_rows(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """All members' rows, ``sizes[i]`` of member i; in the backward pass each gets the sum of its rows' gradients."""
    return _both_ways(rows, channel, what, partial(_gathered, channel, sizes), partial(_scattered, channel, sizes))


def scatter_sum(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """The sum over the members of ``rows`` [sum of sizes, width], of which each keeps its own ``sizes[i]``."""
    return _both_ways(rows, channel, what, partial(_scattered, channel, sizes), partial(_gathered, channel, sizes))


def _both_ways(
    rows: Tensor, channel: Channel, what: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Tensor:
    """``forward`` of the rows, ``backward`` of their gradients, each with its own name; a rank alone moves nothing."""
    if channel.size == 1:
        return rows
    return with_gradient(
        rows, lambda rows: forward(rows, what=what), lambda gradient: backward(gradient, what=in_backward(what))
    )


def _gathered(channel: Channel, sizes: Sequence[int], rows: Tensor, what: str) -> Tensor:
    if channel.group is None or not sum(sizes):
        return rows
    if len(set(sizes)) == 1:
        return channel.run(all_gather, rows, sum(sizes), sizes, what)
    # gloo gathers only equal sizes, and padding would send more bytes: send a copy to each member instead.
    copies = rows.repeat(channel.size, *(1 for _ in rows.shape[1:]))
    return channel.exchange(copies, [rows.shape[0]] * channel.size, sizes, what)


def _scattered(channel: Channel, sizes: Sequence[int], rows: Tensor, what: str) -> Tensor:
    own = sizes[channel.rank]
    if channel.group is None or not sum(sizes):
        return rows
    if len(set(sizes)) == 1:
        return channel.run(reduce_scatter_sum, rows, own, sizes, what)
    parts = channel.exchange(rows, sizes, [own] * channel.size, what)
    return parts.view(channel.size, own, *rows.shape[1:]).sum(0)


NodeOfRank = Callable[[int], int]


def channel(name: str, group: dist.ProcessGroup, node_of_rank: NodeOfRank, traffic: ExchangedBytes) -> Channel:
    """The channel of a process group, by the ``name`` of its dimension."""
    here, ranks = node_of_rank(dist.get_rank()), dist.get_process_group_ranks(group)
    return Channel(name, group, tuple(node_of_rank(rank) != here for rank in ranks), traffic)


def node_channels(mesh: Mesh, node_of_rank: NodeOfRank, traffic: ExchangedBytes) -> tuple[Channel, Channel]:
    """Of this rank's expert-parallel group: the ranks with its place on each node, and those on its own node.

    New groups are made: all ranks of the world must call this equally often.
    """
    division = mesh.divisions["ep"]
    nodes = {len(_same_node(ranks, node_of_rank)) for ranks in division}
    if len(nodes) > 1:
        raise _uneven("some expert-parallel groups span more nodes than others")
    by_node = _same_node(own(division), node_of_rank)
    here = next(ranks for ranks in by_node if dist.get_rank() in ranks)
    opposite = [ranks[here.index(dist.get_rank())] for ranks in by_node]
    between = channel("ep", new_group(opposite, "ep"), node_of_rank, traffic)
    return between, channel("ep", new_group(here, "ep"), node_of_rank, traffic)


def _same_node(ranks: Sequence[int], node_of_rank: NodeOfRank) -> list[list[int]]:
    """The ranks of each node; refuses unequal or interleaved nodes."""
    runs = [(node, list(members)) for node, members in groupby(ranks, node_of_rank)]
    if len({node for node, _ in runs}) < len(runs):
        raise _uneven("the ranks of an expert-parallel group go back and forth between nodes")
    if len({len(members) for _, members in runs}) > 1:
        raise _uneven("an expert-parallel group has more ranks on some nodes than on others")
    return [members for _, members in runs]


def _uneven(problem: str) -> SpecError:
    remedy = "use dispatch: all-to-all, or an ep that is a multiple or a divisor of a node's devices"
    return SpecError("strategy.dispatch", f"deduplicated, but {problem}", remedy)
