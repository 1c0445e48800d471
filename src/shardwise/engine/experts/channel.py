"""Rows between the ranks of a group, forward and backward, with the bytes that they take.

Own functions around `dist.all_to_all_single` and not `all_to_all_single_autograd`: a name and a count for the
backward pass too, no copy into a wrapper tensor, and the same on gloo, NCCL and the fake backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.labels import in_backward
from shardwise.engine.names import sent
from shardwise.engine.reductions import all_gather, reduce_scatter_sum


@dataclass
class Traffic:
    """Bytes that this rank has sent, by what was sent, since the last `clear`."""

    between_nodes: dict[str, int] = field(default_factory=dict)
    inside_node: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.between_nodes.clear()
        self.inside_node.clear()


@dataclass(frozen=True)
class Channel:
    """A group of ranks as one of them sees it: ``away[i]`` says whether member i is on another node."""

    dimension: str
    group: dist.ProcessGroup | None  # None: this rank alone
    away: tuple[bool, ...]
    traffic: Traffic

    @property
    def size(self) -> int:
        return len(self.away)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], what: str) -> Tensor:
        """``send[i]`` rows to member i, in this order; the result has ``receive[i]`` rows of each. No gradient."""
        if self.group is None or self.size == 1:
            return rows
        self.note(what, send, rows)
        result = rows.new_empty(sum(receive), *rows.shape[1:])
        with sent(self.dimension, what, rows):
            dist.all_to_all_single(result, rows.contiguous(), list(receive), list(send), group=self.group)
        return result

    def note(self, what: str, counts: Sequence[int], rows: Tensor) -> None:
        size = rows.element_size() * prod(rows.shape[1:])
        for member, count in enumerate(counts):
            if member != self.rank:
                bytes_by_name = self.traffic.between_nodes if self.away[member] else self.traffic.inside_node
                bytes_by_name[what] = bytes_by_name.get(what, 0) + count * size


@dataclass(frozen=True)
class Splits:
    """How many rows go to each member of a channel and come from it; known on the host."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


def exchange_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """An all-to-all of rows, and of their gradients the other way."""
    if channel.size == 1:
        return rows
    result: Tensor = _Exchange.apply(rows, channel, splits.send, splits.receive, what)  # type: ignore[no-untyped-call]
    return result


def return_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """`exchange_rows` in the other direction: rows go back to where they came from."""
    return exchange_rows(rows, channel, Splits(splits.receive, splits.send), what)


def gather_rows(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """All members' rows, member i's ``sizes[i]``; backward, each gets the sum of the gradients of its rows."""
    if channel.size == 1:
        return rows
    result: Tensor = _Gather.apply(rows, channel, tuple(sizes), what)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """The sum over the members of ``rows`` [sum of sizes, width], of which each keeps its own ``sizes[i]``."""
    if channel.size == 1:
        return rows
    result: Tensor = _ScatterSum.apply(rows, channel, tuple(sizes), what)  # type: ignore[no-untyped-call]
    return result


def _gathered(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    if channel.group is None or not sum(sizes):
        return rows
    if len(set(sizes)) == 1:
        channel.note(what, sizes, rows)
        result = rows.new_empty(sum(sizes), *rows.shape[1:])
        with sent(channel.dimension, what, rows):
            all_gather(result, rows.contiguous(), channel.group)
        return result
    # gloo gathers only equal sizes, and padding would send more: each member is sent a copy instead.
    copies = rows.repeat(channel.size, *(1 for _ in rows.shape[1:]))
    return channel.exchange(copies, [rows.shape[0]] * channel.size, sizes, what)


def _scattered(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    own = sizes[channel.rank]
    if channel.group is None or not sum(sizes):
        return rows
    if len(set(sizes)) == 1:
        channel.note(what, sizes, rows)
        result = rows.new_empty(own, *rows.shape[1:])
        with sent(channel.dimension, what, rows):
            reduce_scatter_sum(result, rows.contiguous(), channel.group)
        return result
    parts = channel.exchange(rows, sizes, [own] * channel.size, what)
    return parts.view(channel.size, own, *rows.shape[1:]).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, channel: Channel, send: Sequence[int], receive: Sequence[int], what: str
    ) -> Tensor:
        ctx.arguments = (channel, receive, send, in_backward(what))
        return channel.exchange(rows, send, receive, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        channel, *splits, what = ctx.arguments
        return channel.exchange(gradient, *splits, what), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
        ctx.arguments = (channel, sizes, in_backward(what))
        return _gathered(rows, channel, sizes, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _scattered(gradient, *ctx.arguments), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
        ctx.arguments = (channel, sizes, in_backward(what))
        return _scattered(rows, channel, sizes, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(gradient, *ctx.arguments), None, None, None
