"""The groups of ranks that exchange tokens, seen from this rank, and which of them cross nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.experts.channel import Channel, Traffic
from shardwise.engine.mesh import Mesh
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
    view = next(view for view in mesh.views if "ep" in (view.mesh_dim_names or ()))
    groups = view.mesh.movedim(-2, -1).reshape(-1, mesh.size("ep"))
    nodes = {len(_same_node(ranks, node_of_rank)) for ranks in groups.tolist()}
    if len(nodes) > 1:
        raise _uneven("some expert-parallel groups span more nodes than others")
    laid_out = groups.reshape(groups.shape[0], nodes.pop(), -1)
    levels = DeviceMesh(view.device_type, laid_out, mesh_dim_names=("other experts", "nodes", "devices"))
    between = _channel("ep", levels["nodes"].get_group(), node_of_rank, traffic)
    inside = _channel("ep", levels["devices"].get_group(), node_of_rank, traffic)
    return between, inside


def same_ranks(mesh: Mesh, one: str, other: str) -> bool:
    """Whether two names of the mesh mean the same ranks everywhere."""
    first, second = (_all_groups(mesh, name) for name in (one, other))
    return first == second


def _all_groups(mesh: Mesh, name: str) -> set[tuple[int, ...]]:
    view = next(view for view in mesh.views if name in (view.mesh_dim_names or ()))
    dimension = (view.mesh_dim_names or ()).index(name)
    groups: torch.Tensor = view.mesh.movedim(dimension, -1).reshape(-1, view.mesh.shape[dimension])
    return {tuple(sorted(ranks)) for ranks in groups.tolist()}


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
