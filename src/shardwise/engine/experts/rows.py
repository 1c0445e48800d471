"""Rows of tokens: copied to where they are needed and summed again, exchanged between ranks, and counted.

Copies are gathers only, forward and backward: no sum depends on the order of atomic additions, and the host reads
nothing. One `Copies` serves `spread`, `collect` and both backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.autograd import with_gradient
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.labels import in_backward
from shardwise.engine.mesh import Mesh, new_group, own
from shardwise.engine.profiler_ranges import Pending, sent, wait_for
from shardwise.spec.errors import SpecError


@dataclass(frozen=True)
class Copies:
    """Which rows are copied where, and which copies each row has."""

    source: Tensor  # [copies]: the row that each copy is made of
    listed: Tensor  # [copies]: the same copies, row by row
    starts: Tensor  # [rows]: where in `listed` the copies of each row begin
    each: int | None = None  # copies of every row, if all rows have the same number


def sorted_copies(keys: Tensor) -> Copies:
    """One copy of row r for each of ``keys[r]`` [rows, k], in the order of the keys; row by row in that of k."""
    rows, each = keys.shape
    order = keys.flatten().argsort(stable=True)
    return Copies(order // each, inverse(order), torch.arange(rows, device=keys.device) * each, each)


def some_sorted_copies(keys: Tensor, wanted: Tensor, total: int) -> tuple[Copies, Tensor]:
    """`sorted_copies` of only the ``total`` keys that ``wanted`` [rows, k] marks, and the flat indices of these."""
    order = keys.masked_fill(~wanted, torch.iinfo(keys.dtype).max).flatten().argsort(stable=True)
    marked = torch.nonzero_static(wanted.flatten(), size=total)[:, 0]
    each = wanted.sum(1)
    listed = inverse(order).index_select(0, marked)
    return Copies(order[:total] // keys.shape[1], listed, each.cumsum(0) - each), marked


def masked_copies(mask: Tensor, total: int) -> Copies:
    """A copy of row r for every column that ``mask`` [rows, columns] marks, column by column, ``total`` of them."""
    source = torch.nonzero_static(mask.T.contiguous(), size=total)[:, 1]
    places = mask.T.flatten().cumsum(0).view(mask.shape[1], -1).T.flatten() - 1
    marked = torch.nonzero_static(mask.flatten(), size=total)[:, 0]
    each = mask.sum(1)
    return Copies(source.contiguous(), places.index_select(0, marked), each.cumsum(0) - each)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def spread(rows: Tensor, copies: Copies) -> Tensor:
    """[rows, width] to [copies, width]."""
    result: Tensor = _Spread.apply(rows, copies)  # type: ignore[no-untyped-call]
    return result


def collect(rows: Tensor, copies: Copies, weights: Tensor | None = None) -> Tensor:
    """[copies, width] to [rows, width]: the sum of each row's copies, times ``weights`` [copies] in listed order."""
    if weights is not None:
        weights = weights.to(rows.dtype)
    result: Tensor = _Collect.apply(rows, weights, copies)  # type: ignore[no-untyped-call]
    return result


def _summed(rows: Tensor, listed: Tensor, starts: Tensor, each: int | None, weights: Tensor | None = None) -> Tensor:
    if each is None:
        # A bag holds one row's copies: PyTorch's kernel adds in fp32 and writes only the sum.
        return F.embedding_bag(listed, rows.contiguous(), starts, mode="sum", per_sample_weights=weights)
    # Faster on a GPU than bags (H200, 8,192 x 8 rows of 2,048 bf16: 0.24 against 0.36 ms, weighted 0.40 against 0.49).
    apart = torch.unflatten(rows.index_select(0, listed), 0, (-1, each))
    return apart.sum(1) if weights is None else torch.bmm(weights.view(-1, 1, each), apart)[:, 0]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.listed, copies.starts)
        ctx.each = copies.each
        return rows.index_select(0, copies.source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        listed, starts = ctx.saved_tensors
        return _summed(gradient, listed, starts, ctx.each), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.source, *(() if weights is None else (copies.listed, weights, rows)))
        return _summed(rows, copies.listed, copies.starts, copies.each, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, *weighted = ctx.saved_tensors
        gradients = gradient.index_select(0, source)
        if not weighted:
            return gradients, None, None
        listed, weights, rows = weighted
        of_weights = torch.linalg.vecdot(gradients, rows).index_select(0, listed)
        by_copy = torch.empty_like(weights).scatter_(0, listed, weights)
        return gradients.mul_(by_copy[:, None]), of_weights, None


# -- Rows exchanged between the ranks of a group, forward and backward, and counted ----------------
# Unlike PyTorch's `all_to_all_single_autograd`, the backward pass has a name and a byte count too, nothing is copied
# into a wrapper tensor, and gloo, NCCL and the fake backend behave alike.


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
    group: dist.ProcessGroup | None  # none: this rank alone
    away: tuple[bool, ...]  # for each member, whether it is on another node
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


# -- What the host reads of the routing ------------------------------------------------------------
# An all-to-all takes its splits from the host, which has to wait for the row counts: the only host synchronisation of a
# dispatch. (PyTorch's symmetric memory has exchanges that read their splits on the device, but only for GPUs of one
# NVLink domain and with worst-case buffers.) The counts are copied while the device sorts and copies the rows; the host
# reads nothing else, forward or backward.


class HostCopy:
    """A copy of some numbers to the host, started when this is made."""

    def __init__(self, numbers: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> list[int]:
        """Waits for the numbers."""
        if self._ready is not None:
            self._ready.synchronize()
        return [int(number) for number in self._numbers.tolist()]


@dataclass(frozen=True)
class Assumed:
    """The load that a dry run assumes, since it routes nothing."""

    skew: float = 1.0  # how many times as busy as the mean this rank's experts are
    nodes: int | None = None  # the most nodes that a token goes to; None: as many as random choices reach


def in_pieces(numbers: list[int], *lengths: int) -> list[tuple[int, ...]]:
    """The numbers cut into pieces of the given lengths."""
    left = iter(numbers)
    return [tuple(islice(left, length)) for length in lengths]


def evenly(total: float, places: int) -> tuple[int, ...]:
    """About ``total`` / ``places`` for each place, integers whose sum is ``total`` rounded."""
    whole = round(total)
    return tuple(whole * (place + 1) // places - whole * place // places for place in range(places))
