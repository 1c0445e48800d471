"""Context parallelism of a whole network: every ``attend`` is replaced by one over all ranks of a sequence."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.engine.context.across import AcrossRanks
from shardwise.engine.context.documents import WholeDocuments
from shardwise.engine.context.gather import GatheredAttention
from shardwise.engine.context.kernels import KernelChoice, kernel_for
from shardwise.engine.context.ring import RingAttention
from shardwise.engine.context.ulysses import UlyssesAttention
from shardwise.engine.mesh import Mesh
from shardwise.spec.strategy import Strategy


def apply_context(module: nn.Module, mesh: Mesh, strategy: Strategy, choose: KernelChoice = kernel_for) -> None:
    """Sets ``attend`` on every submodule that has one; tokens must be split by `cut_sequence` from then on."""
    if strategy.cp == 1:
        return
    group, overlap = mesh.group("cp"), strategy.overlap.cp
    documents = WholeDocuments(group, strategy.context_method)  # one for all layers: gathered once
    across: AcrossRanks | None = None
    if strategy.context_method != "ulysses":
        kind = RingAttention if strategy.context_method == "ring" else GatheredAttention
        across = kind(group, documents, overlap, choose)
    for part in module.modules():
        if hasattr(part, "attend"):
            own: Any = part.attend
            part.attend = across or UlyssesAttention(group, documents, own)  # type: ignore[assignment]
