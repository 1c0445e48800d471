"""Cuts a network over the tensor-parallel ranks by its table of patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.mesh import Mesh
from shardwise.engine.parameters import HeldPart, has_note, note_part
from shardwise.engine.patterns import Patterns, change_attribute, matching, replace_module
from shardwise.engine.tensor.collectives import copy, gather, narrow_move
from shardwise.engine.tensor.linear import RowLinear, WideNorm, column_matmuls, cut_columns, cut_fused
from shardwise.engine.tensor.vocabulary import CutEmbedding, CutHead, cut_loss
from shardwise.spec.model import Model

Hook = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]
Entry = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def apply_tensor(root: nn.Module, mesh: Mesh, patterns: Patterns, model: Model) -> None:
    """Cuts ``root`` in place.

    Under sequence parallelism each rank holds a part of the sequence between the regions; a region gathers the hidden
    states, and its last, row-parallel layer scatters them again.
    """
    if mesh.size("tp") == 1:
        return
    rank, group, sequence_parallel = mesh.rank("tp"), mesh.group("tp"), mesh.strategy.sequence_parallel
    overlap = mesh.strategy.overlap.tp
    regions = _regions(root, patterns)
    for pattern, heads in patterns.columns.items():
        for _, linear in matching(root, pattern):
            cut_columns(linear, rank, group.size(), getattr(model, heads) if heads else 0)
    for pattern, counts in patterns.fused.items():
        for _, linear in matching(root, pattern):
            cut_fused(linear, rank, group.size(), [getattr(model, count) for count in counts])
    for pattern, paths in patterns.divided.items():
        for _, module in matching(root, pattern):
            for path in paths:
                change_attribute(module, path, lambda count: count // group.size())
    for pattern in patterns.rows:
        for name, linear in list(matching(root, pattern)):
            replace_module(root, name, RowLinear(linear, rank, group, sequence_parallel, overlap))
    for region in regions.values():
        if hasattr(region, "project"):
            region.project = column_matmuls(group, sequence_parallel, overlap)  # type: ignore[assignment]
            if hasattr(region, "every_head"):
                region.every_head = narrow_move(group, sequence_parallel)  # type: ignore[assignment]
        else:  # such a region keeps the gathered states for its backward pass, those above only their own part
            region.register_forward_pre_hook(_entry(group, sequence_parallel, patterns.hidden), with_kwargs=True)
    for pattern, heads in patterns.wide_norms.items():
        for name, norm in list(matching(root, pattern)):
            replace_module(root, name, WideNorm(norm, rank, group, getattr(model, heads) if heads else 0))
    _cut_vocabulary(root, patterns, model, rank, group, sequence_parallel)
    for _, positions in matching(root, patterns.position_embedding):
        if sequence_parallel:
            positions.register_forward_pre_hook(_own_positions(rank, group.size()))
    _note_the_rest(root, regions, patterns, group.size(), sequence_parallel)


def _regions(root: nn.Module, patterns: Patterns) -> dict[str, nn.Module]:
    """The modules that directly hold cut layers: an MLP, but not a mixture of experts in its place."""
    columns = (*patterns.columns, *patterns.fused)
    cut = {name.rpartition(".")[0] for pattern in columns for name, _ in matching(root, pattern)}
    return {name: region for pattern in patterns.regions for name, region in matching(root, pattern) if name in cut}


def _entry(group: dist.ProcessGroup, sequence_parallel: bool, keyword: str) -> Entry:
    """A hook that gathers or copies a region's hidden states before its forward pass."""
    move = gather if sequence_parallel else copy

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if keyword in named:
            return arguments, {**named, keyword: move(named[keyword], group)}
        return (move(arguments[0], group), *arguments[1:]), named

    return enter


def _own_positions(rank: int, size: int) -> Hook:
    def cut(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        positions: Tensor = arguments[0]
        return (torch.unflatten(positions, -1, (size, -1)).select(-2, rank), *arguments[1:])

    return cut


def _cut_vocabulary(
    root: nn.Module, patterns: Patterns, model: Model, rank: int, group: dist.ProcessGroup, sequence_parallel: bool
) -> None:
    embeddings = list(matching(root, patterns.embedding))
    heads = list(matching(root, patterns.head))
    tied = bool(embeddings and heads and embeddings[0][1].weight is heads[0][1].weight)
    for name, embedding in embeddings:
        assert isinstance(embedding, nn.Embedding)
        replace_module(root, name, CutEmbedding(embedding, rank, group, sequence_parallel))
    for name, head in heads:
        assert isinstance(head, nn.Linear)
        cut = CutHead(head, rank, group, sequence_parallel)
        replace_module(root, name, cut)
        if hasattr(root, "loss_function"):
            softcap = model.numerics.logit_softcap
            root.loss_function = cut_loss(head.out_features, rank, group, sequence_parallel, softcap)  # type: ignore[assignment]
        if tied:
            cut.weight = root.get_submodule(patterns.embedding).weight  # type: ignore[assignment]


def _note_the_rest(
    root: nn.Module, regions: dict[str, nn.Module], patterns: Patterns, size: int, sequence_parallel: bool
) -> None:
    """Notes whole parameters as copies; gradients are partial where a rank does not see all tokens or all heads."""
    inside = {id(module) for region in regions.values() for module in region.modules()}
    inside -= {id(module) for pattern in patterns.headless for _, module in matching(root, pattern)}
    experts = {id(module) for _, part in matching(root, patterns.experts) for module in part.modules()}
    for module in root.modules():
        if id(module) in experts:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if not has_note(module, name):
                partial = "tp" if sequence_parallel or id(module) in inside else None
                note_part(module, name, HeldPart(tuple(parameter.shape), copies=size, partial=partial))
