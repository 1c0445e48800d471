"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022,
arXiv 2205.05198): linear layers cut by column and row, the vocabulary cut over the ranks.

By hand and not by DTensor: it cannot repeat key-value heads over a part of a group, pads no vocabulary, and costs a
dispatch for every operator.
"""

from __future__ import annotations

from shardwise.engine.tensor.apply import apply_tensor

__all__ = ["apply_tensor"]
