"""The groups of ranks that exchange tokens, seen from this rank, and which of them cross nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch.distributed as dist

from shardwise.engine.experts.channel import Channel, Traffic
from shardwise.engine.mesh import Mesh, new_group, own
from shardwise.spec.errors import SpecError

NodeOfRank = Callable[[int], int]


def channel(mesh: Mesh, name: str, node_of_rank: NodeOfRank, traffic: Traffic) -> Channel:
    """The group ``name`` of the mesh."""
    return _channel(name, mesh.group(name), node_of_rank, traffic)


def alone(traffic: Traffic) -> Channel:
    """No other rank."""
    return Channel("", None, (False,), traffic)


def node_channels(mesh: Mesh, node_of_rank: NodeOfRank, traffic: Traffic) -> tuple[Channel, Channel]:
    """Of this rank's expert-parallel group: the ranks with its place on each node, and those on its own node.

    New groups are made: every rank of the world calls this as often as the others.
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


def _channel(name: str, group: dist.ProcessGroup, node_of_rank: NodeOfRank, traffic: Traffic) -> Channel:
    here = node_of_rank(dist.get_rank())
    ranks = dist.get_process_group_ranks(group)
    return Channel(name, group, tuple(node_of_rank(rank) != here for rank in ranks), traffic)


def _same_node(ranks: Sequence[int], node_of_rank: NodeOfRank) -> list[list[int]]:
    """The ranks node by node; equally many on each, and each node's together."""
    runs = [(node, list(members)) for node, members in groupby(ranks, node_of_rank)]
    if len({node for node, _ in runs}) < len(runs):
        raise _uneven("the ranks of an expert-parallel group go back and forth between nodes")
    if len({len(members) for _, members in runs}) > 1:
        raise _uneven("an expert-parallel group has more ranks on some nodes than on others")
    return [members for _, members in runs]


def _uneven(problem: str) -> SpecError:
    remedy = "use dispatch: all-to-all, or an ep that is a multiple or a divisor of a node's devices"
    return SpecError("strategy.dispatch", f"deduplicated, but {problem}", remedy)
