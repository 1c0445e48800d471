"""Activation recompute: what the forward pass does not keep is computed again when the backward pass asks for it."""

from __future__ import annotations

from shardwise.engine.recompute.apply import apply_recompute
from shardwise.engine.recompute.discarded_outputs import Forgotten

__all__ = ["Forgotten", "apply_recompute"]
