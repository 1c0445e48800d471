"""A whole training step as one CUDA graph: recorded once for each shape of batch, then launched by one call.

A step of a small model is a thousand kernels of a few microseconds each, which the host launches more slowly than the
device runs them. A graph runs the same kernels on the same memory again, so whatever changes from step to step has to
be a tensor: tokens, learning rates and the limit of the loss are copied in before a replay; the optimizer's step number
and the loss scale are on the device anyway.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.engine.batch import Batch
from shardwise.engine.torch_private import (
    foreach_copy_,
    free_matmul_workspaces,
    new_graph_pool,
    profiler_enabled,
    recording,
)
from shardwise.engine.trainer import StepResult
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes

_logger = logging.getLogger("shardwise.engine")

WARM_STEPS = 3  # not recorded: kernels are compiled and chosen; the last shows whether the host has to wait
MOST_GRAPHS = 4  # rows of packed documents have a shape for each power of two
USABLE = 0.95  # of a device's memory


class PlainStep(Protocol):
    """A step as it is written."""

    def __call__(self, batch: Batch, *, loss_limit: Tensor | float | None) -> StepResult: ...


def why_not_recorded(job: Job, device: torch.device) -> str | None:
    """Why the steps of a job cannot be recorded, as far as that is known before the first; None if they can."""
    if device.type != "cuda" and job.training.graphs is not False:
        return f"a {device.type.upper()} has none"
    return job.why_not_recorded


class StepGraphs:
    """Runs steps, by graphs where possible; otherwise ``reason`` says why not. ``groups`` are the optimizer's.

    Recording computes nothing, so after a failed recording the step runs without a graph. Where the job requires
    graphs, the failure is an error.
    """

    def __init__(self, job: Job, groups: list[dict[str, Any]]) -> None:
        own = groups[0]["params"]  # none on a stage that trains nothing
        device = own[0].device if own else groups[0]["step"].device
        self._groups = groups
        self._required = job.training.graphs is True
        self.reason: str | None = None
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool = new_graph_pool() if device.type == "cuda" else None  # all graphs share it: they never run at once
        problem = why_not_recorded(job, device)
        if problem is not None:
            self._give_up(problem, told=device.type == "cuda" and job.training.graphs is not False)

    def __call__(
        self, step: PlainStep, forget: Callable[[], None], batch: Batch, loss_limit: Tensor | float | None
    ) -> StepResult:
        """Runs one step; ``forget`` clears what a failed recording of it has left in the host's bookkeeping."""
        if self.reason is not None or profiler_enabled():  # a profile needs the ranges that the host marks
            return step(batch, loss_limit=loss_limit)
        shape = _shape(batch)
        graph = self._graphs.get(shape) or self._recorded(step, forget, batch, shape)
        if graph is not None:
            return graph.replay(batch, [group["lr"] for group in self._groups], loss_limit)
        with _waits_of_the_host(seen=self._seen[shape] == WARM_STEPS) as waits:
            result = step(batch, loss_limit=loss_limit)
        if waits:
            self._give_up(f"the host waits for the device, in {waits[0]}")
        return result

    @property
    def recorded(self) -> int:
        return len(self._graphs)

    def _recorded(self, step: PlainStep, forget: Callable[[], None], batch: Batch, shape: Hashable) -> _Graph | None:
        """A new graph, once there have been enough steps of that shape."""
        self._seen[shape] += 1
        if self._seen[shape] <= WARM_STEPS or self.recorded == MOST_GRAPHS:
            return None
        problem = None if self._required else _too_little_room()
        if problem is None:
            try:
                self._graphs[shape] = _Graph(step, self._groups, batch, self._pool)
                return self._graphs[shape]
            except RuntimeError as error:
                forget()
                problem = f"the step cannot be recorded: {_first_problem(error)}"
        gc.collect()  # tensors of the failed step are held by the frames of its error, which are in reference cycles
        free_matmul_workspaces()  # those of the stream on which it was recorded
        self._give_up(problem)
        return None

    def _give_up(self, problem: str, told: bool = True) -> None:
        if self._required:
            raise SpecError("training.graphs", f"there are no CUDA graphs: {problem}", "graphs: auto")
        self.reason = problem
        if told:
            _logger.warning("no CUDA graphs: %s", problem)


def _first_problem(error: BaseException) -> str:
    """What made a recording fail: ending an invalid recording raises a second error on top of the first."""
    first = error.__context__ if error.__context__ is not None and "captur" in str(error) else error
    lines = str(first).strip().splitlines() or [type(first).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # the compiler names itself in a line of its own


class _Graph:
    """One recorded step: the tensors it reads and writes have the same places in every replay."""

    def __init__(self, step: PlainStep, groups: list[dict[str, Any]], batch: Batch, pool: Any) -> None:
        self._batch = batch.changed(laid_out_as)
        device = batch.tokens.device
        self._rates = [torch.empty((), device=device) for _ in groups]
        self._limit = torch.full((), torch.inf, device=device)
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # tensors of earlier steps must not be freed while recording
        with _rates_of(groups, self._rates), recording(self._graph, pool):
            result = step(self._batch, loss_limit=self._limit)
            self._numbers = torch.stack([result.loss, result.gradient_norm])

    def replay(self, batch: Batch, rates: list[float], loss_limit: Tensor | float | None) -> StepResult:
        kept, given = ([_elements(tensor) for tensor in _tensors(some)] for some in (self._batch, batch))
        foreach_copy_(kept, given)
        for tensor, rate in zip(self._rates, rates):
            tensor.fill_(rate)
        self._limit.fill_(torch.inf if loss_limit is None else loss_limit)
        self._graph.replay()
        return StepResult(*self._numbers.clone().unbind())  # the next replay writes there again


def laid_out_as(tensor: Tensor) -> Tensor:
    """A copy with the same strides: for other strides, compiled layers would be compiled again."""
    own = _elements(tensor)
    copy = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
    return copy.copy_(own).expand(tensor.shape)


def _elements(tensor: Tensor) -> Tensor:
    """The elements with memory of their own: positions that all rows share are kept once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@contextmanager
def _waits_of_the_host(seen: bool) -> Iterator[list[str]]:
    """Lists, if ``seen``, where the host waits for the device inside, which no graph can do; complete at the end."""
    waits: list[str] = []
    if not (seen and torch.cuda.is_available()):
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in told:
        if "called a synchronizing CUDA operation" in str(warning.message):
            waits.append(f"{Path(warning.filename).name}, line {warning.lineno}")
        elif "prototype feature" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def _rates_of(groups: list[dict[str, Any]], rates: list[Tensor]) -> Iterator[None]:
    """Makes the optimizer read its learning rates from tensors inside."""
    before = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        yield
    finally:
        for group, value in zip(groups, before):
            group["lr"] = value


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, but for what prediction modules read, which follows from these."""
    return [tensor for tensor in (batch.tokens, batch.labels, batch.positions, batch.documents) if tensor is not None]


def _shape(batch: Batch) -> Hashable:
    """What a recorded step depends on, besides the values of tensors."""
    shapes = tuple((tensor.shape, _elements(tensor).shape) for tensor in _tensors(batch))
    return shapes, batch.documents is None, batch.most_documents


def _too_little_room() -> str | None:
    """Why a graph would not fit: it keeps the memory of a step, and a step without it (profiled) needs as much again.

    Memory that other processes hold is not counted as usable.
    """
    peak, states = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    needed, there = 2 * peak - states, (torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]) * USABLE
    if needed <= there:
        return None
    return f"a step and what they keep would need {readable_bytes(needed)}, {readable_bytes(there)} are usable"
