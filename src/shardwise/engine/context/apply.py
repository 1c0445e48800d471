"""Which function computes attention, and context parallelism around it: every ``attend`` of a network replaced."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.engine.context.blocks import KernelChoice, kernel_for
from shardwise.engine.context.distributed_attention import AcrossRanks
from shardwise.engine.context.gather import GatheredAttention
from shardwise.engine.context.ring import RingAttention
from shardwise.engine.context.sequence import WholeDocuments
from shardwise.engine.context.ulysses import UlyssesAttention
from shardwise.engine.mesh import Mesh
from shardwise.models.dot_product import unfused_attention
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def apply_attention(module: nn.Module, training: Training) -> None:
    """Modules with an ``attend`` have the fused one from the beginning."""
    if training.attention == "unfused":
        for part in module.modules():
            if hasattr(part, "attend"):
                part.attend = unfused_attention  # type: ignore[assignment]


def apply_context(module: nn.Module, mesh: Mesh, strategy: Strategy, choose: KernelChoice = kernel_for) -> None:
    """Sets ``attend`` on every submodule that has one; tokens must be split by `cut_sequence` from then on."""
    if strategy.cp == 1:
        return
    group = mesh.group("cp")
    documents = WholeDocuments(group, strategy.context_method)  # one for all layers: gathered once
    across: AcrossRanks | None = None
    if strategy.context_method != "ulysses":
        kind = RingAttention if strategy.context_method == "ring" else GatheredAttention
        across = AcrossRanks(kind, group, documents, strategy.overlap.cp, choose)
    for part in module.modules():
        if hasattr(part, "attend"):
            own: Any = part.attend
            part.attend = across or UlyssesAttention(group, documents, own)  # type: ignore[assignment]
