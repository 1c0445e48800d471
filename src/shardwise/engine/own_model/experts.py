"""Stacked experts of other networks, spread over ranks: their own forward pass runs on the rows that arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.experts import exchange_of
from shardwise.engine.experts.groups import NodeOfRank
from shardwise.engine.mesh import Mesh
from shardwise.engine.parts import Part
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.tensor.linear import keep
from shardwise.models.experts import TokenExchange


def spread_experts(root: nn.Module, mesh: Mesh, patterns: Patterns, node_of_rank: NodeOfRank, number: int) -> None:
    """Cuts the experts of every layer, and takes tokens to them and back. Every rank of the world calls this.

    An experts module maps (rows, numbers of their experts [rows, k], weights [rows, k]) to rows, and counts its
    experts in ``num_experts``.
    """
    exchange = exchange_of(number, mesh, mesh.strategy, node_of_rank)
    for _, experts in matching(root, patterns.experts):
        _cut(experts, mesh, patterns)
        if exchange is not None:
            _send_through(experts, exchange, number // mesh.size("ep"))


def _cut(experts: nn.Module, mesh: Mesh, patterns: Patterns) -> None:
    """This rank's experts, and of each its part of the inner features."""
    for name, whole in list(experts.named_parameters(recurse=False)):
        part = _run(Part(tuple(whole.shape), expert=True), 0, 1, mesh.rank("ep"), mesh.size("ep"))
        dimension, blocks = patterns.expert_features[name]
        part = _run(part, dimension, blocks, mesh.rank("expert_tp"), mesh.size("expert_tp"))
        keep(experts, name, part)


def _run(part: Part, dimension: int, blocks: int, rank: int, ranks: int) -> Part:
    each = part.shape[dimension] // blocks // ranks
    return part if ranks == 1 else part.cut(dimension, rank * each, (rank + 1) * each, blocks)


def _send_through(experts: Any, exchange: TokenExchange, here: int) -> None:
    plain = experts.forward
    experts.num_experts = here

    def forward(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        arrived, counts, handle = exchange.dispatch(rows, indices)
        numbers = torch.arange(here, device=rows.device)
        of_rows = torch.repeat_interleave(numbers, counts, output_size=arrived.shape[0])[:, None]
        results = plain(arrived, of_rows, arrived.new_ones((arrived.shape[0], 1)))
        combined: Tensor = exchange.combine(results, weights, handle)
        return combined.clone() if combined._is_view() else combined  # FSDP warns of views that leave its modules

    experts.forward = forward
