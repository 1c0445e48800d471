"""Ranges in a profile: marks phases, layers and collectives with the names that `labels` writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from shardwise.engine.labels import begin_name, wait_name
from shardwise.engine.torch_private import NVTX, disable_profiler, enable_nvtx, profiler_enabled, profiler_type


class Pending(Protocol):
    """A collective in flight: its result is valid after ``wait``."""

    def wait(self) -> Any: ...


def marked(name: str) -> AbstractContextManager[object]:
    """A range in a running profile, else nothing: a hundred ranges would make a step 1% slower.

    In compiled layers it is always a range, which the compiler leaves out by itself.
    """
    if torch.compiler.is_compiling():
        return record_function(name)
    if not profiler_enabled():
        return nullcontext()
    # torch has no domains of NVTX: a range is in the default one.
    return torch.cuda.nvtx.range(name) if profiler_type() == NVTX else record_function(name)


@contextmanager
def nvtx_ranges() -> Iterator[None]:
    """Makes NVTX ranges of all ranges inside, also in the threads of backward passes; no other profiler may run."""
    enable_nvtx()
    try:
        yield
    finally:
        disable_profiler()


def named(phase: str) -> AbstractContextManager[object]:
    """Marks what runs inside; by `marked`, which whoever counts ranges replaces."""
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
    """Marks where the host of this rank waits for a collective that it started, or for a message of another rank.

    ``what`` is the name of the collective or message; waits of the same name come in the order of their starts.
    """
    return marked(wait_name(dimension, what))
