"""Gradients that travel in fewer bytes than they have, with the same sum on every rank."""

from __future__ import annotations

from shardwise.engine.compression.momentum import MomentumSum
from shardwise.engine.compression.reduction import CompressedSum, compressed_sum

__all__ = ["CompressedSum", "MomentumSum", "compressed_sum"]
