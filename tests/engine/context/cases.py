"""Attention of a rank's part of the sequences against attention of whole sequences in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.context.across_ranks import AcrossRanks, GatheredAttention, RingAttention
from shardwise.engine.context.apply import Attend, UlyssesAttention
from shardwise.engine.context.blocks import KernelChoice, kernel_for
from shardwise.engine.context.sequence import WholeDocuments, cut_sequence
from shardwise.models.dot_product import AttentionArguments, dot_product_attention

METHODS = ("ring", "all-gather", "ulysses")


@dataclass(frozen=True)
class Case:
    method: str
    causal: bool = True
    batch: int = 2
    seq: int = 32
    heads: int = 4
    key_heads: int = 2
    features: int = 16
    value_features: int = 16
    window: int | None = None
    documents: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    overlap: bool = True


def attend_of(method: str, group: dist.ProcessGroup, overlap: bool = True, choose: KernelChoice = kernel_for) -> Attend:
    documents = WholeDocuments(group, method)
    if method == "ulysses":
        return UlyssesAttention(group, documents, dot_product_attention)
    kind = {"ring": RingAttention, "all-gather": GatheredAttention}[method]
    return AcrossRanks(kind, group, documents, overlap, choose)


def inputs_of(case: Case) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient, the same on every rank."""
    random = torch.Generator().manual_seed(7)
    shapes = [
        (case.heads, case.features),
        (case.key_heads, case.features),
        (case.key_heads, case.value_features),
        (case.heads, case.value_features),
    ]
    return tuple(torch.randn(case.batch, case.seq, *shape, generator=random).to(case.dtype) for shape in shapes)


def arguments_of(case: Case) -> AttentionArguments:
    documents = None
    if case.documents:  # of unequal lengths, other ones in each row
        starts = torch.rand(case.batch, case.seq, generator=torch.Generator().manual_seed(3)) < 0.15
        documents = starts.cumsum(1)
    sinks = torch.linspace(-1.0, 2.0, case.heads).requires_grad_() if case.sinks else None
    return AttentionArguments(case.causal, case.window, case.features**-0.5, documents, sinks=sinks)


def gradients_of(attend: Attend, tensors: tuple[Tensor, ...], arguments: AttentionArguments) -> list[Tensor]:
    """The output and the gradients of query, key and value; those of sinks are left with them."""
    *inputs, gradient = (tensor.detach().clone() for tensor in tensors)
    for tensor in inputs:
        tensor.requires_grad_()
    out = attend(*inputs, arguments)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def worst_deviation(cases: list[Case], choose: KernelChoice = kernel_for) -> list[float]:
    """Of each case, on this rank: max |a − b| / max |b| over output and gradients."""
    return [max(deviations(case, choose)) for case in cases]


def deviations(case: Case, choose: KernelChoice = kernel_for) -> list[float]:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    tensors, arguments = inputs_of(case), arguments_of(case)
    # The reference in fp32: a 16-bit kernel's own rounding is not what is compared.
    expected = gradients_of(dot_product_attention, tuple(tensor.float() for tensor in tensors), arguments)
    attend = attend_of(case.method, group, case.overlap, choose)
    local = tuple(cut_sequence(tensor, rank, size, case.method) for tensor in tensors)
    own = arguments_of(case)
    if own.documents is not None:
        own = replace(own, documents=cut_sequence(own.documents, rank, size, case.method))
    found = gradients_of(attend, local, own)
    differences = [
        float((mine.float() - cut_sequence(whole, rank, size, case.method)).abs().max() / whole.abs().max())
        for mine, whole in zip(found, expected, strict=True)
    ]
    if arguments.sinks is not None and own.sinks is not None:
        assert own.sinks.grad is not None and arguments.sinks.grad is not None
        dist.all_reduce(own.sinks.grad)
        wanted = arguments.sinks.grad
        differences.append(float((own.sinks.grad - wanted).abs().max() / wanted.abs().max()))
    return differences
