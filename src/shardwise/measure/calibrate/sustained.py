"""Times kernels on a GPU as a long step runs them: on a hot card, different kernels in turn, launched without gaps.

A cold card runs a burst of matmuls a quarter faster than a long step does, before its power limit lowers the clocks.
The other kernels of a step draw less power than matmuls alone. So all figures are recorded as CUDA graphs and launched
in turn, in an order that changes from round to round; each has operands that no cache holds.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.torch_private import new_graph_pool
from shardwise.models.dot_product import AttentionArguments, dot_product_attention

_logger = logging.getLogger("shardwise.measure")
Call = Callable[[], Any]
_FIGURE_SECONDS = 1e-3  # of one launch of a figure: long compared with the resolution of events
_MOST_CALLS = 40
_NOISE = 2**30  # elements
_PAIRS = 20
_COPIES_BESIDE = 3  # of 0.13 ms, after each figure of about 1 ms
_COPIES_PER_CALL = (20, 9, 5, 2, 0)  # of 0.13 ms beside 1.5 to 2 ms
CACHED_BYTES = 2e8  # more than any GPU's cache


class RandomOperands:
    """Operands as parts of one block of random numbers: a matmul of zeros would draw less power and run faster."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._numbers = torch.randn(_NOISE, device=device, dtype=dtype)
        self._next = 0

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self._next + size > self._numbers.numel():
            self._next = 0
        part = self._numbers[self._next : self._next + size].view(shape).detach()
        self._next += -(-size // 128) * 128  # 256 bytes: as an allocator aligns
        return part


@dataclass(frozen=True)
class TimedCalls:
    """What is timed: ``calls`` do the same on different operands."""

    calls: tuple[Call, ...]


def sets_of(moved_bytes: float) -> int:
    """How many operand sets of ``moved_bytes`` it takes to exceed any cache."""
    return max(1, min(8, math.ceil(CACHED_BYTES / moved_bytes)))


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    calls: int
    kept: TimedCalls  # keeps the operands alive, which the graph reads


def _record(figure: TimedCalls, stream: torch.cuda.Stream, pool: Any) -> _Recorded | None:
    first = figure.calls[0]
    with torch.cuda.stream(stream):
        try:
            first()
        except RuntimeError as error:
            _logger.warning("left out of the calibration: %s", str(error).splitlines()[0])
            return None
        stream.synchronize()
        began = time.perf_counter()
        first()
        stream.synchronize()
        count = int(_FIGURE_SECONDS / max(1e-6, time.perf_counter() - began))
        count = max(len(figure.calls), min(_MOST_CALLS, count))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for number in range(count):
                figure.calls[number % len(figure.calls)]()
        finally:
            graph.capture_end()
    return _Recorded(graph, count, figure)


def heat(device: torch.device, seconds: float) -> None:
    """Runs matmuls until the clocks have settled."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            torch.mm(left, right)
        torch.cuda.synchronize(device)


def sustained_seconds(
    figures: Sequence[TimedCalls], device: torch.device, seconds: float, ready: Call = lambda: None
) -> tuple[list[float | None], float]:
    """The median seconds of a call of each figure, and the share of the time that figures (not copies) took.

    None for a figure that the device or the installation cannot run. All are measured within about ``seconds``, with
    copies between them, as a step has element-wise kernels between its matmuls. ``ready`` is called before the first is
    timed.
    """
    stream, pool = torch.cuda.Stream(device), new_graph_pool()  # type: ignore[no-untyped-call]
    tries = ((number, _record(calls, stream, pool)) for number, calls in enumerate(figures))
    recorded = {number: graph for number, graph in tries if graph is not None}
    spent_on: dict[int, list[float]] = {number: [] for number in recorded}
    order, shuffled = list(recorded), random.Random(0)
    ready()
    heat(device, min(2.0, seconds / 4))
    began = time.perf_counter()
    source = torch.randn(2**27, device=device, dtype=torch.bfloat16)
    beside = partial(torch.empty_like(source).copy_, source)
    shares: list[float] = []
    while time.perf_counter() - began < seconds or len(shares) < 3:
        shuffled.shuffle(order)
        times, whole = _round([recorded[number] for number in order], beside)
        shares.append(sum(times) / whole)
        for number, spent in zip(order, times):
            spent_on[number].append(spent / recorded[number].calls)
    medians = {number: statistics.median(spent) for number, spent in spent_on.items()}
    return [medians.get(number) for number in range(len(figures))], statistics.median(shares)


@dataclass(frozen=True)
class Mix:
    """Seconds of a matmul or of attention that runs for ``share`` of the time, with copies in the rest."""

    share: float
    seconds: float
    attention: bool = False


def mixes(device: torch.device, seconds: float) -> list[Mix]:
    """Times one matmul, and one attention, beside different numbers of copies, each mix for about ``seconds``."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    query, key, value, gradient = (
        torch.randn(4, 4096, heads, 128, device=device, dtype=torch.bfloat16).requires_grad_(graded)
        for heads, graded in ((16, True), (4, True), (4, True), (16, False))
    )
    arguments = AttentionArguments(causal=True, window=None, scale=128**-0.5)

    def attention() -> Any:
        attended = dot_product_attention(query, key, value, arguments)
        return torch.autograd.grad(attended, (query, key, value), gradient)

    source = torch.randn(2**27, device=device, dtype=torch.bfloat16)
    beside = partial(torch.empty_like(source).copy_, source)
    matmuls = [_mixed(partial(torch.mm, left, right), beside, copies, seconds) for copies in _COPIES_PER_CALL]
    ends = (_COPIES_PER_CALL[0], _COPIES_PER_CALL[-1])
    return [*matmuls, *(replace(_mixed(attention, beside, copies, seconds), attention=True) for copies in ends)]


def _mixed(call: Call, beside: Call, copies: int, seconds: float) -> Mix:
    began, spent = time.perf_counter(), list[tuple[float, float]]()
    while time.perf_counter() - began < seconds:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _PAIRS + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for number in range(_PAIRS):
            call()
            marks[2 * number + 1].record()
            for _ in range(copies):
                beside()
            marks[2 * number + 2].record()
        torch.cuda.synchronize()
        times = [earlier.elapsed_time(other) / 1e3 for earlier, other in pairwise(marks)]
        spent.append((sum(times[::2]), sum(times)))
    later = spent[len(spent) // 2 :]  # the clocks have settled
    of_call, whole = (sum(both[place] for both in later) for place in (0, 1))
    return Mix(of_call / whole, of_call / (len(later) * _PAIRS))


def _round(recorded: Sequence[_Recorded], beside: Call) -> tuple[list[float], float]:
    """Seconds of each figure, and from the first to the last."""
    marks = []
    for figure in recorded:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        figure.graph.replay()
        after.record()
        for _ in range(_COPIES_BESIDE):
            beside()
        marks.append((before, after))
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in marks]
    return times, marks[0][0].elapsed_time(marks[-1][1]) / 1e3
