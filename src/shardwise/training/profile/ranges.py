"""Named ranges of this process as PyTorch's profiler sees them, and nothing else of what it could see.

Operators are left out: to record each of them takes about as long as a small one runs. What is left are the names that
the engine gives to passes, layers and collectives, and those that the backend gives to what it does on its own threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from shardwise.engine.labels import of_backend
from shardwise.training.profile.record import HOST, STREAMS, Range


@contextmanager
def recorded(device: torch.device) -> Iterator[Callable[[int], list[Range]]]:
    """Records until the end of the block; then the ranges can be had, in seconds since a moment in nanoseconds."""
    kinds: Any = torch._C._profiler
    activities = {kinds.ProfilerActivity.CPU}
    if device.type == "cuda":
        activities.add(kinds.ProfilerActivity.CUDA)
    # The public class knows no scopes; it makes the settings, which changed between versions.
    settings = autograd_profiler.profile(use_kineto=True, use_device="cuda" if device.type == "cuda" else None)
    config = settings.config(create_trace_id=False)  # type: ignore[no-untyped-call]
    inner: Any = torch._C._autograd
    inner._prepare_profiler(config, activities)
    inner._enable_profiler(config, activities, {kinds.RecordScope.USER_SCOPE})
    found: list[Any] = []
    try:
        yield lambda zero_ns: _ranges(found, zero_ns)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found += inner._disable_profiler().events()


def _ranges(events: list[Any], zero_ns: int) -> list[Range]:
    """In the order of their starts; a longer one before what it holds."""
    lanes = _Lanes()
    found = [
        Range(one.name(), (one.start_ns() - zero_ns) / 1e9, (one.end_ns() - zero_ns) / 1e9, lanes.of(one))
        for one in events
        if one.duration_ns() > 0
    ]
    return sorted(found, key=lambda one: (one.start, -one.end))


class _Lanes:
    """Small numbers for threads: the one that asks, which trains, is the host's."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._host = threading.get_native_id()

    def of(self, event: Any) -> int:
        if event.device_type() != torch._C._autograd.DeviceType.CPU:
            return STREAMS + int(event.device_resource_id())
        thread = int(event.device_resource_id())
        # A send or a receive of gloo begins on the thread that trains and ends there much later: it lies beside.
        if thread == self._host and not of_backend(event.name()):
            return HOST
        return self._known.setdefault((thread, of_backend(event.name())), len(self._known) + 1)
