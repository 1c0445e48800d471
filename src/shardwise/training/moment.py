"""Moments of a device's work: the host, which is ahead of a GPU, cannot tell them by its own clock."""

from __future__ import annotations

import time

import torch


class Moment:
    """When the work that was begun before is done; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """After `wait`."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3
