"""Cuts a network over the tensor-parallel ranks by its table of patterns; the vocabulary of its two ends as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.parameters import HeldPart, has_note, keep, note_part
from shardwise.engine.patterns import Patterns, change_attribute, matching, replace_module
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.tensor.linear import (
    RowLinear,
    WideNorm,
    column_matmuls,
    copy,
    cut_columns,
    cut_fused,
    gather,
    join,
    narrow_move,
    reduce,
    scatter,
)
from shardwise.models.adapters import Adapter, adapter_of
from shardwise.models.loss import differentiate_, statistics, summed_loss
from shardwise.spec.model import Model

# -- Embedding, head and loss with the vocabulary cut over the ranks -------------------------------
# A vocabulary that does not divide is padded: rows beyond it are zero, are never looked up, and their logits are minus
# infinity, so that they get neither probability nor gradient.


@dataclass(frozen=True)
class Slice:
    """The token ids of one rank: ``width`` of them from ``start`` on."""

    vocabulary: int  # ids from here on do not exist: they are padding
    width: int
    start: int

    @classmethod
    def of(cls, vocabulary: int, rank: int, size: int) -> Slice:
        width = -(-vocabulary // size)
        return cls(vocabulary, width, rank * width)

    @property
    def present(self) -> int:
        return max(0, min(self.width, self.vocabulary - self.start))

    def part(self, shape: tuple[int, ...]) -> HeldPart:
        return HeldPart(shape).cut(0, self.start, self.start + self.width)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers in this slice, and whether the token is in it at all (else row 0)."""
        inside = (tokens >= self.start) & (tokens < self.start + self.present)
        return torch.where(inside, tokens - self.start, 0), inside


class CutEmbedding(nn.Module):
    """Looks up the rows held here; the sum over the ranks completes them."""

    def __init__(self, embedding: nn.Embedding, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.slice = Slice.of(embedding.num_embeddings, rank, group.size())
        self.weight = embedding.weight
        keep(self, "weight", self.slice.part(tuple(embedding.weight.shape)))
        self.group, self.join = group, scatter if sequence_parallel else reduce
        padding = embedding.padding_idx  # a row that learns nothing
        here = padding is not None and 0 <= padding - self.slice.start < self.slice.width
        self.padding = padding - self.slice.start if padding is not None and here else None
        # Gemma's, under its own name, by which `initialise` asks for it.
        scale = getattr(embedding, "embed_scale", None)
        self.embed_scale: Tensor | None
        self.register_buffer("embed_scale", None if scale is None else torch.as_tensor(scale), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, inside = self.slice.local(tokens)
        embedded = F.embedding(rows, self.weight, self.padding) * inside.unsqueeze(-1).to(self.weight.dtype)
        whole = self.join(embedded, self.group)
        return whole if self.embed_scale is None else whole * self.embed_scale.to(self.weight.dtype)


class CutHead(nn.Module):
    """The head for callers that want logits: all of them, on every rank. Training goes through `cut_loss` instead."""

    def __init__(self, head: nn.Linear, rank: int, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.slice = Slice.of(head.out_features, rank, group.size())
        self.weight, self.bias = head.weight, head.bias
        keep(self, "weight", self.slice.part(tuple(head.weight.shape)))
        if head.bias is not None:
            keep(self, "bias", self.slice.part(tuple(head.bias.shape)))
        self.group, self.enter = group, gather if sequence_parallel else copy

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self.enter(hidden, self.group), self.weight, self.bias)
        return join(logits, self.group)[..., : self.slice.vocabulary]


Loss = Callable[..., Tensor]


def cut_loss(
    vocabulary: int, rank: int, group: dist.ProcessGroup, sequence_parallel: bool, softcap: float | None = None,
    loss_of: Callable[..., Tensor] = summed_loss,
) -> Loss:  # fmt: skip
    """The loss function of a model whose head is cut: the same sum (or, of `token_entropies`, the same numbers) on
    every rank."""
    own, enter = Slice.of(vocabulary, rank, group.size()), gather if sequence_parallel else copy

    def loss(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shares: Tensor | None = None
    ) -> Tensor:
        return loss_of(enter(hidden, group), weight, bias, labels, shares, softcap, partial(_entropy, own, group))

    return loss


def _entropy(
    own: Slice, group: dist.ProcessGroup, logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None,
    differentiated: bool,
) -> Tensor:  # fmt: skip
    """For this rank's logits.

    Ranks exchange three numbers per token: the largest logit, the sum of exponentials and the logit of the label
    (Shoeybi et al. 2019, section 3).
    """
    row, inside = own.local(labels)
    column = torch.where(inside, row, -1)
    local_largest, exponentials, right = statistics(logits, column, own.present, softcap)
    largest = local_largest.clone()
    with sent("tp", Called.LARGEST_LOGITS, largest):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([exponentials * (local_largest - largest).exp(), (right - largest).where(inside, 0.0)])
    with sent("tp", Called.EXPONENTIALS, sums):
        dist.all_reduce(sums, group=group)
    if differentiated:
        differentiate_(logits, column, factors, largest, sums[0], own.present, softcap)
    return (sums[0].log() - sums[1]) * factors


# -- The network -----------------------------------------------------------------------------------

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
    for pattern in patterns.head_vectors:
        _cut_vectors(root, pattern, rank, group.size())
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
            _note_narrow(region, group.size(), sequence_parallel)
            if hasattr(region, "every_head"):
                region.every_head = narrow_move(group, sequence_parallel)  # type: ignore[assignment]
        else:  # such a region keeps the gathered states for its backward pass, those above only their own part
            region.register_forward_pre_hook(_entry(group, sequence_parallel, patterns.hidden), with_kwargs=True)
    for pattern, heads in patterns.wide_norms.items():
        for name, norm in list(matching(root, pattern)):
            replace_module(root, name, WideNorm(norm, rank, group, getattr(model, heads) if heads else 0))
    for module in root.modules():
        if isinstance(module, Adapter) and module.dropout is not None:
            module.dropout.part = rank, group.size()
    _cut_vocabulary(root, patterns, model, rank, group, sequence_parallel)
    for _, positions in matching(root, patterns.position_embedding):
        if sequence_parallel:
            positions.register_forward_pre_hook(_own_positions(rank, group.size()))
    _note_the_rest(root, regions, patterns, group.size(), sequence_parallel)


def _cut_vectors(root: nn.Module, pattern: str, rank: int, size: int) -> None:
    owners, _, name = pattern.rpartition(".")
    for _, module in matching(root, owners):
        if (whole := getattr(module, name, None)) is not None:
            own = whole.shape[0] // size
            keep(module, name, HeldPart(tuple(whole.shape)).cut(0, rank * own, (rank + 1) * own))


def _note_narrow(region: Any, size: int, sequence_parallel: bool) -> None:
    """The narrow matrices of adapters before the collective of `with_adapters`, which completes their gradients unless
    each rank has seen only its part of the sequence."""
    for linear in region.projections():
        if (adapter := adapter_of(linear)) is not None:
            partial = "tp" if sequence_parallel else None
            note_part(adapter, "a", HeldPart(tuple(adapter.a.shape), copies=size, partial=partial))


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
    headless = [module for pattern in patterns.headless for _, module in matching(root, pattern)]
    inside -= {id(part) for module in headless for part in module.modules()}
    experts = {id(module) for _, part in matching(root, patterns.experts) for module in part.modules()}
    for module in root.modules():
        if id(module) in experts:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if not has_note(module, name):
                partial = "tp" if sequence_parallel or id(module) in inside else None
                note_part(module, name, HeldPart(tuple(parameter.shape), copies=size, partial=partial))
