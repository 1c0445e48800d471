"""A whole training step as one CUDA graph: recorded once for each shape of batch, then launched by one call.

A step of a small model is a thousand kernels of a few microseconds, which the host launches more slowly than the device
runs them. A graph runs the same kernels on the same memory again, so what changes from step to step has to be a tensor:
tokens, learning rates and the limit of the loss are copied in before; the optimizer's step number and the scale of the
loss are on the device anyway. The last step before is a rehearsal: a step on those tensors and on the stream of the
recording, so that whatever the compiler makes for them alone is there.
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
from shardwise.engine.torch_private import foreach_copy_, new_graph_pool, profiler_enabled, recording
from shardwise.engine.trainer import StepResult
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes

_logger = logging.getLogger("shardwise.engine")

WARM_STEPS = 3  # before a step is recorded: kernels are compiled and chosen; the last is its rehearsal
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
    """Runs steps, by graphs where it can; ``reason`` says why there are none, if so. ``groups`` are the optimizer's.

    A recording computes nothing: after a failed one the step runs as it is written. Where the job requires graphs, that
    is an error.
    """

    def __init__(self, job: Job, groups: list[dict[str, Any]]) -> None:
        device = groups[0]["params"][0].device
        self._groups = groups
        self._required = job.training.graphs is True
        self.reason: str | None = None
        self._seen: Counter[Hashable] = Counter()
        self._rehearsals: dict[Hashable, _Graph] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool = new_graph_pool() if device.type == "cuda" else None  # all graphs share it: they never run at once
        problem = why_not_recorded(job, device)
        if problem is not None:
            self._give_up(problem, told=device.type == "cuda" and job.training.graphs is not False)

    def __call__(
        self, step: PlainStep, forget: Callable[[], None], batch: Batch, loss_limit: Tensor | float | None
    ) -> StepResult:
        """``forget`` drops what a failed recording of ``step`` has left in the host's bookkeeping."""
        if self.reason is not None or profiler_enabled():  # a profile needs the ranges that the host marks
            return step(batch, loss_limit=loss_limit)
        shape = _shape(batch)
        if shape not in self._graphs and shape not in self._rehearsals:
            return self._warm_up(step, batch, shape, loss_limit)
        graph = self._graphs.get(shape) or self._recorded(step, forget, shape)
        if graph is None:
            return step(batch, loss_limit=loss_limit)
        return graph.replay(batch, self._rates, loss_limit)

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @property
    def _rates(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    def _warm_up(self, step: PlainStep, batch: Batch, shape: Hashable, loss_limit: Tensor | float | None) -> StepResult:
        """A step before there is a graph; the last of them is rehearsed, unless there are graphs enough."""
        self._seen[shape] += 1
        if self._seen[shape] != WARM_STEPS or len(self._graphs) + len(self._rehearsals) == MOST_GRAPHS:
            return step(batch, loss_limit=loss_limit)
        graph = self._rehearsals[shape] = _Graph(self._groups, batch)
        with _waits_of_the_host() as waits:
            result = graph.rehearse(step, batch, self._rates, loss_limit)
        if waits:
            self._give_up(f"the host waits for the device, in {waits[0]}")
        return result

    def _recorded(self, step: PlainStep, forget: Callable[[], None], shape: Hashable) -> _Graph | None:
        """A new graph, of a step that was rehearsed."""
        graph = self._rehearsals.pop(shape)
        problem = None if self._required else _too_little_room()
        if problem is None:
            try:
                graph.record(step, self._pool)
                self._graphs[shape] = graph
                return graph
            except RuntimeError as error:
                forget()
                problem = f"the step cannot be recorded: {_first_problem(error)}"
        gc.collect()  # what the failed step has made is in the frames of its error, and those in cycles
        self._give_up(problem)
        return None

    def _give_up(self, problem: str, told: bool = True) -> None:
        if self._required:
            raise SpecError("training.graphs", f"there are no CUDA graphs: {problem}", "graphs: auto")
        self.reason = problem
        self._rehearsals.clear()
        if told:
            _logger.warning("no CUDA graphs: %s", problem)


def _first_problem(error: BaseException) -> str:
    """What ended a recording; the end of one that has become invalid is another error, on top of it."""
    first = error.__context__ if error.__context__ is not None and "captur" in str(error) else error
    lines = str(first).strip().splitlines() or [type(first).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # the compiler names itself in a line of its own


class _Graph:
    """One step to record: the tensors it reads and writes have the same places in every replay."""

    def __init__(self, groups: list[dict[str, Any]], batch: Batch) -> None:
        self._groups = groups
        self._batch = batch.changed(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        device = batch.tokens.device
        self._rates = [torch.empty((), device=device) for _ in groups]
        self._limit = torch.full((), torch.inf, device=device)
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def rehearse(
        self, step: PlainStep, batch: Batch, rates: list[float], loss_limit: Tensor | float | None
    ) -> StepResult:
        """The step itself, under all that holds while it is recorded."""
        self._fill(batch, rates, loss_limit)
        gc.collect()
        torch.cuda.empty_cache()  # the other stream has memory of its own
        self._stream.wait_stream(torch.cuda.current_stream())
        with _rates_of(self._groups, self._rates), torch.cuda.stream(self._stream):
            result = self._numbers_of(step)
        torch.cuda.current_stream().wait_stream(self._stream)
        return StepResult(*result.unbind())

    def record(self, step: PlainStep, pool: Any) -> None:
        gc.collect()  # tensors of earlier steps must not be freed while recording
        with _rates_of(self._groups, self._rates), recording(self._graph, pool, self._stream):
            self._numbers = self._numbers_of(step)

    def _numbers_of(self, step: PlainStep) -> Tensor:
        result = step(self._batch, loss_limit=self._limit)
        return torch.stack([result.loss, result.gradient_norm])

    def replay(self, batch: Batch, rates: list[float], loss_limit: Tensor | float | None) -> StepResult:
        self._fill(batch, rates, loss_limit)
        self._graph.replay()
        return StepResult(*self._numbers.clone().unbind())  # the next replay writes there again

    def _fill(self, batch: Batch, rates: list[float], loss_limit: Tensor | float | None) -> None:
        foreach_copy_(_tensors(self._batch), _tensors(batch))
        for tensor, rate in zip(self._rates, rates):
            tensor.fill_(rate)
        self._limit.fill_(torch.inf if loss_limit is None else loss_limit)


@contextmanager
def _waits_of_the_host() -> Iterator[list[str]]:
    """Where the host waits for the device inside, which no graph can do; known when it ends."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in told:
        if "called a synchronizing CUDA operation" in str(one.message):
            found.append(f"{Path(one.filename).name}, line {one.lineno}")
        elif "prototype feature" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@contextmanager
def _rates_of(groups: list[dict[str, Any]], rates: list[Tensor]) -> Iterator[None]:
    """The optimizer reads its learning rates from tensors meanwhile."""
    before = [group["lr"] for group in groups]
    try:
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        yield
    finally:
        for group, value in zip(groups, before):
            group["lr"] = value


def _tensors(batch: Batch) -> list[Tensor]:
    """What prediction modules read follows from these."""
    return [one for one in (batch.tokens, batch.labels, batch.positions, batch.documents) if one is not None]


def _shape(batch: Batch) -> Hashable:
    """What a recorded step depends on, besides the values of tensors."""
    return tuple(one.shape for one in _tensors(batch)), batch.documents is None, batch.most_documents


def _too_little_room() -> str | None:
    """A graph keeps what a step takes beside the states; a step that is not replayed (profiled) takes it again.

    What other processes hold of the device is not there.
    """
    peak, states = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    needed, there = 2 * peak - states, (torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0]) * USABLE
    if needed <= there:
        return None
    return f"a step and what they keep would need {readable_bytes(needed)}, {readable_bytes(there)} are usable"
