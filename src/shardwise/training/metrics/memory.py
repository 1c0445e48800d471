"""Memory of this rank: on a GPU what its allocator has, on a CPU the bytes in tensors; never the process's own size."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.training.metrics.tensor_bytes import TensorBytes, is_wrapper

Result = TypeVar("Result")


@contextmanager
def tensors_counted() -> Iterator[TensorBytes]:
    """Counts the bytes in all tensors of this process, those that are there already too; slows every operator."""
    memory = TensorBytes()
    gc.unfreeze()  # what is frozen is not found
    memory.watch([one for one in gc.get_objects() if _holds_storage(type(one))])
    gc.freeze()
    memory.reset_peak()
    with memory:
        yield memory


def peak_during(device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
    """What ``work`` gives, and the most bytes while it ran; on a GPU since the start, or the last time it was reset."""
    if device.type == "cuda":
        result = work()
        return result, torch.cuda.max_memory_allocated(device)
    with tensors_counted() as memory:
        result = work()
    return result, memory.peak


def device_memory(device: torch.device) -> dict[str, int]:
    """Peaks of the allocator since the start; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def resident_bytes() -> int:
    """The process in physical memory, with everything that it shares; logged beside the rest, compared with nothing."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _holds_storage(kind: type) -> bool:
    return issubclass(kind, Tensor) and not is_wrapper(kind)
