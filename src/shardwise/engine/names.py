"""Names that a profiler shows: the plan's own words on every phase, layer and collective."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import record_function


def named(phase: str) -> AbstractContextManager[object]:
    """Marks what runs inside; on a GPU an NVTX range comes with it under ``torch.autograd.profiler.emit_nvtx``."""
    return record_function(phase)


def sent(dimension: str, what: str, tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Marks a collective with its dimension and the bytes that this rank gives it."""
    return record_function(f"{dimension}: {what} {tensor.numel() * tensor.element_size()} B")


def waited(dimension: str, what: str) -> AbstractContextManager[object]:
    """Marks where this rank's host stands still for a collective that it began before, or for another rank's message.

    ``what`` is the collective's own name, or the message's; the waits of one name come in the order of its beginnings.
    """
    return record_function(f"{dimension}: wait for {what}")
