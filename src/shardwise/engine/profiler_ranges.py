"""Ranges in a profile: marks phases, layers and collectives with the names that `labels` writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from shardwise.engine.labels import begin_name, wait_name
from shardwise.engine.torch_private import profiler_enabled


class Pending(Protocol):
    """A collective in flight: its result is valid after ``wait``."""

    def wait(self) -> Any: ...


def marked(name: str) -> AbstractContextManager[object]:
    """A profiler's range, or nothing without a profiler: a hundred ranges would make a step 1% slower.

    In compiled layers always a range, which the compiler leaves out by itself.
    """
    if torch.compiler.is_compiling() or profiler_enabled():
        return record_function(name)
    return nullcontext()


def named(phase: str) -> AbstractContextManager[object]:
    """Marks what runs inside; on a GPU an NVTX range comes with it under ``torch.autograd.profiler.emit_nvtx``."""
    return marked(phase)


def sent(dimension: str, what: str, tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Marks a collective with its dimension and the bytes that this rank contributes."""
    return marked(begin_name(dimension, what, tensor.numel() * tensor.element_size()))


def wait_for(work: Pending | None, dimension: str, what: str) -> None:
    """Waits for a collective that was started, if it was."""
    if work is not None:
        with waited(dimension, what):
            work.wait()


def waited(dimension: str, what: str) -> AbstractContextManager[object]:
    """Marks where this rank's host is blocked on a collective that it started before, or on another rank's message.

    ``what`` is the name of the collective or message; waits of one name come in the order in which they began.
    """
    return marked(wait_name(dimension, what))
