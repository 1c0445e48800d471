"""Rows exchanged between the ranks of a group, forward and backward, and counted; which groups exchange tokens.

Not PyTorch's `all_to_all_single_autograd`: here the backward pass has a name and a byte count too, nothing is copied
into a wrapper tensor, and gloo, NCCL and the fake backend behave alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import torch.distributed as dist
from torch import Tensor

from shardwise.engine.autograd import with_gradient
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.labels import in_backward
from shardwise.engine.mesh import Mesh, new_group, own
from shardwise.engine.profiler_ranges import sent
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
    """A group of ranks as one of them sees it: ``away[i]`` says whether member i is on another node."""

    dimension: str
    group: dist.ProcessGroup | None  # None: this rank alone
    away: tuple[bool, ...]
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
    """How many rows to send to and receive from each member of a channel; known on the host."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


def exchange_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """An all-to-all of rows, and of their gradients the other way."""
    if channel.size == 1:
        return rows
    send, receive = splits.send, splits.receive
    return with_gradient(
        rows,
        lambda rows: channel.exchange(rows, send, receive, what),
        lambda gradient: channel.exchange(gradient, receive, send, in_backward(what)),
    )


def return_rows(rows: Tensor, channel: Channel, splits: Splits, what: str) -> Tensor:
    """`exchange_rows` in the other direction: rows go back to where they came from."""
    return exchange_rows(rows, channel, Splits(splits.receive, splits.send), what)


def gather_rows(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """All members' rows, ``sizes[i]`` of member i; in the backward pass each gets the sum of its rows' gradients."""
    if channel.size == 1:
        return rows
    return with_gradient(
        rows,
        lambda rows: _gathered(rows, channel, sizes, what),
        lambda gradient: _scattered(gradient, channel, sizes, in_backward(what)),
    )


def scatter_sum(rows: Tensor, channel: Channel, sizes: Sequence[int], what: str) -> Tensor:
    """The sum over the members of ``rows`` [sum of sizes, width], of which each keeps its own ``sizes[i]``."""
    if channel.size == 1:
        return rows
    return with_gradient(
        rows,
        lambda rows: _scattered(rows, channel, sizes, what),
        lambda gradient: _gathered(gradient, channel, sizes, in_backward(what)),
    )


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


NodeOfRank = Callable[[int], int]


def channel(mesh: Mesh, name: str, node_of_rank: NodeOfRank, traffic: ExchangedBytes) -> Channel:
    """The group ``name`` of the mesh."""
    return _channel(name, mesh.group(name), node_of_rank, traffic)


def alone(traffic: ExchangedBytes) -> Channel:
    """A channel of this rank alone."""
    return Channel("", None, (False,), traffic)


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
    between = _channel("ep", new_group(opposite), node_of_rank, traffic)
    inside = _channel("ep", new_group(here), node_of_rank, traffic)
    return between, inside


def _channel(name: str, group: dist.ProcessGroup, node_of_rank: NodeOfRank, traffic: ExchangedBytes) -> Channel:
    here = node_of_rank(dist.get_rank())
    ranks = dist.get_process_group_ranks(group)
    return Channel(name, group, tuple(node_of_rank(rank) != here for rank in ranks), traffic)


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
