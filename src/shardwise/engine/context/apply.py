"""Which function computes attention, and context parallelism around it: every ``attend`` of a network replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.autograd import with_gradient
from shardwise.engine.context.across_ranks import AcrossRanks, GatheredAttention, RingAttention
from shardwise.engine.context.blocks import KernelChoice, kernel_for
from shardwise.engine.context.sequence import WholeDocuments
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.optim.precision import precision_of
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import all_to_all_single_autograd
from shardwise.models import flash_attention_4, flexible_attention
from shardwise.models.dot_product import AttentionArguments, unfused_attention
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

# -- Ulysses (Jacobs et al. 2023, arXiv 2309.14509): all tokens of some heads instead of some tokens of all heads ----
# One all-to-all sends queries, keys and values, another returns the output. In between, the module's own ``attend``
# sees whole sequences in order, so it takes care of windows and documents itself. If there are fewer key heads than
# ranks, they are repeated when they are packed, and their gradients are summed when these are unpacked.

Attend = Callable[[Tensor, Tensor, Tensor, AttentionArguments], Tensor]


class UlyssesAttention:
    """An ``attend`` for tokens cut into contiguous pieces, around the ``attend`` for whole sequences."""

    def __init__(self, group: dist.ProcessGroup, documents: WholeDocuments, attend: Attend) -> None:
        self.group, self.documents, self.attend = group, documents, attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        check_heads(query.shape[2], key.shape[2], self.group.size())
        # No positions: queries and keys have been rotated already, and whole rows are in order.
        sinks = None if arguments.sinks is None else arguments.sinks.chunk(self.group.size())[self.group.rank()]
        whole = replace(
            arguments, documents=self.documents.of(arguments.documents), positions=None, bounds=None, sinks=sinks
        )
        query, key, value = _to_heads((query, key, value), self.group)
        return _to_sequence(self.attend(query, key, value, whole), self.group)


def check_heads(heads: int, key_heads: int, size: int) -> None:
    if heads % size:
        problem = f"{size} does not divide {heads} query heads (ulysses)"
        raise SpecError("strategy.cp", problem, "use a divisor, or context_method: ring")
    if key_heads % size and size % key_heads:
        problem = f"{size} neither divides {key_heads} key-value heads nor repeats them evenly (ulysses)"
        raise SpecError("strategy.cp", problem, "use a divisor or a multiple, or context_method: ring")


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Tensor]:
    """[batch, local seq, heads, features] of each tensor → [batch, seq, own heads, features]."""
    size, (batch, seq) = group.size(), tensors[0].shape[:2]
    by_rank = []
    for tensor in tensors:
        copies = max(1, size // tensor.shape[2])
        repeated = tensor.reshape(batch, seq, size // copies, 1, -1).expand(-1, -1, -1, copies, -1)
        by_rank.append(repeated.permute(2, 3, 0, 1, 4).flatten(0, 1))
    rows = _exchanged(torch.cat(by_rank, -1), group).transpose(0, 1).flatten(1, 2)  # a view of a single sequence
    for tensor, columns in zip(tensors, torch.split(rows, [part.shape[-1] for part in by_rank], -1), strict=True):
        yield torch.unflatten(columns, -1, (-1, tensor.shape[-1]))


def _to_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq, own heads, features] → [batch, local seq, heads, features]."""
    by_rank = torch.unflatten(tensor, 1, (group.size(), -1)).transpose(0, 1).contiguous()
    return _exchanged(by_rank, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row r of ``by_rank`` goes to rank r."""
    with sent("cp", Called.HEADS, by_rank):
        if torch.compiler.is_compiling():  # the form that a compiler knows
            ones = [1] * group.size()
            compiled: Tensor = all_to_all_single_autograd(by_rank, ones, ones, group)
            return compiled
        return _all_to_all(by_rank, group)


def _all_to_all(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    def exchange(sending: Tensor) -> Tensor:
        received = torch.empty_like(sending)
        dist.all_to_all_single(received, sending, group=group)
        return received

    return with_gradient(by_rank, exchange, lambda gradient: _all_to_all(gradient.contiguous(), group))


# -- What replaces a module's attention ------------------------------------------------------------


def apply_attention(module: nn.Module, training: Training) -> None:
    """Replaces ``attend`` where the job asks for unfused attention; modules start with the fused one."""
    if training.attention == "unfused":
        for part in module.modules():
            if hasattr(part, "attend"):
                part.attend = unfused_attention  # type: ignore[assignment]


def kernel_words(job: Job, device: torch.device) -> str:
    """Says whose kernel computes a job's attention on a device and, if it is not FlashAttention-4, why not."""
    model = job.model
    if job.training.attention == "unfused":
        return "plain matmuls, scores are stored"
    heads = precision_of(job.training).compute, model.query_key_dim, model.value_dim
    why = "heads have sinks" if model.attention_sinks else ""
    why = "scores are capped" if model.numerics.attention_softcap is not None else why
    against = flash_attention_4.misfit(*heads) or flash_attention_4.obstacle(device)
    if why and (against or why == "scores are capped"):
        flexible = device.type == "cuda" and flexible_attention.fits(*heads)
        kernel = "PyTorch's FlexAttention" if flexible else "plain matmuls of some queries at a time"
        return f"{kernel}, since {why}"
    if device.type == "cpu":
        return "PyTorch's"
    return (
        f"PyTorch's, not FlashAttention-4: {against}" if against else f"FlashAttention-4 {flash_attention_4.version()}"
    )


def apply_context(module: nn.Module, mesh: Mesh, strategy: Strategy, choose: KernelChoice = kernel_for) -> None:
    """Sets ``attend`` on every submodule that has one; tokens must be split by `cut_sequence` from then on."""
    if strategy.cp == 1:
        return
    group = mesh.group("cp")
    documents = WholeDocuments(group, strategy.context_method)  # of all layers: they are gathered once
    across: AcrossRanks | None = None
    if strategy.context_method != "ulysses":
        kind = RingAttention if strategy.context_method == "ring" else GatheredAttention
        across = AcrossRanks(kind, group, documents, strategy.overlap.cp, choose)
    for part in module.modules():
        if hasattr(part, "attend"):
            own: Any = part.attend
            part.attend = across or UlyssesAttention(group, documents, own)  # type: ignore[assignment]
