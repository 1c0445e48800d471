"""Which function computes attention, and context parallelism around it: every ``attend`` of a network replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.engine.context.across_ranks import AcrossRanks, GatheredAttention, RingAttention
from shardwise.engine.context.blocks import KernelChoice, kernel_for
from shardwise.engine.context.sequence import WholeDocuments
from shardwise.engine.context.ulysses import UlyssesAttention
from shardwise.engine.mesh import Mesh
from shardwise.engine.optim.precision import precision_of
from shardwise.models import flash_attention_4, flexible_attention
from shardwise.models.dot_product import unfused_attention
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


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
    capped = model.numerics.attention_softcap is not None
    if capped and device.type == "cuda" and flexible_attention.fits(*heads):
        return "PyTorch's FlexAttention, since scores are capped"
    if capped:
        return "plain matmuls of some queries at a time, since scores are capped"
    if device.type == "cpu":
        return "PyTorch's"
    against = flash_attention_4.misfit(*heads) or flash_attention_4.obstacle(device)
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
