"""Which function computes attention where one rank has whole sequences; context parallelism is put around it."""

from __future__ import annotations

from torch import nn

from shardwise.models.dot_product import unfused_attention
from shardwise.spec.training import Training


def apply_attention(module: nn.Module, training: Training) -> None:
    """Modules with an ``attend`` have the fused one from the beginning."""
    if training.attention == "unfused":
        for part in module.modules():
            if hasattr(part, "attend"):
                part.attend = unfused_attention  # type: ignore[assignment]
