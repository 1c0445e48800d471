"""Gradients that travel in fewer bytes than they have, with the same sum on every rank."""

from __future__ import annotations

from shardwise.engine.compression.choose import CompressedSum, compressed_sum
from shardwise.engine.compression.one_bit_adam import MomentumSum

__all__ = ["CompressedSum", "MomentumSum", "compressed_sum"]
