"""Gradients that are only rounding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwise.measure.reference import global_norm, largest

NEGLIGIBLE = 1e-6  # of the global norm: gradients this small are rounding (a key bias has gradient zero in theory)


def negligible(gradients: Mapping[str, Tensor]) -> frozenset[str]:
    """Parameters whose gradients are only rounding."""
    norm = global_norm(gradients.values())
    return frozenset(name for name, one in gradients.items() if largest(one) < NEGLIGIBLE * norm)
