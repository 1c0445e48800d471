"""Offload that follows what memory is measured: more of the optimizer's states leave when it is short, and come back.

The share moves by eighths, and back only where the next counted step would still be well below the limit, so that it
does not swing.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.trainer import Trainer

STEP = 1 / 8
SHORT, AMPLE = 0.95, 0.85  # of what a device has for tensors


class Pressure:
    """Of one rank; all ranks are told the same peak and so do the same."""

    def __init__(self, trainer: Trainer[Any]) -> None:
        device, offload = trainer.job.cluster.device, trainer.job.strategy.offload
        self.trainer, self.share = trainer, offload.optimizer
        self.least = max(offload.weights, offload.gradients)
        self.limit_bytes = device.usable_memory - device.framework_memory

    def after(self, peak_bytes: int) -> float | None:
        """The share from now on, where the fullest rank's ``peak_bytes`` of the last step move it."""
        share = self._wanted(peak_bytes)
        if share == self.share:
            return None
        self.share = share
        self.trainer.offload_optimizer(share)
        if self.trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.trainer.device)
        return share

    def _wanted(self, peak_bytes: int) -> float:
        if peak_bytes > SHORT * self.limit_bytes:
            return min(1.0, self.share + STEP)
        if peak_bytes + STEP * self.trainer.optimizer.state_bytes < AMPLE * self.limit_bytes:
            return max(self.least, self.share - STEP)
        return self.share
