"""Measures one GPU: kernels one by one on a hot card, what its power limit does, and whole steps of small models.

The kernels are matmuls of many shapes, of experts and in FP8, attention, and copies.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.fp8.linear import fp8_cast, fp8_largest, fp8_product
from shardwise.engine.torch_private import new_graph_pool
from shardwise.measure.calibrate.steps import CASES, CaseSample, Compiling, measured_cases
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.spec.efficiency import SCALINGS
from shardwise.spec.hardware import Device

# -- timing kernels as a long step runs them: on a hot card, different kernels in turn, without gaps ---
# A cold card runs a burst of matmuls a quarter faster than a long step does, before its power limit lowers the clocks.
# The other kernels of a step draw less power than matmuls alone. So all figures are recorded as CUDA graphs and
# launched in turn, in an order that changes from round to round; each has operands that no cache holds.

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


# -- the figures of a GPU ----------------------------------------------------------------------------

Product = Literal["forward", "input", "weight"]
PRODUCTS: tuple[Product, ...] = ("forward", "input", "weight")


@dataclass(frozen=True)
class ProductFigure:
    """One of the three products of a linear layer of ``inner`` by ``columns``."""

    rows: int  # tokens
    inner: int
    columns: int
    product: Product  # the output, or the gradient of the input or of the weight
    matrices: int = 1  # experts, among which rows are divided evenly
    scaling: str = ""  # of FP8; empty for bf16
    seconds: float = 0.0


@dataclass(frozen=True)
class AttentionFigure:
    """Causal attention, with ``key_heads`` shared by all ``heads``."""

    batch: int
    seq: int
    heads: int
    key_heads: int
    features: int  # of a query and a key
    value_features: int
    both: bool  # forward and backward, not only forward
    window: int | None = None
    softcap: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class CopyFigure:
    """A copy that reads ``bytes`` and writes as many."""

    bytes: int
    seconds: float = 0.0


GpuFigure = ProductFigure | AttentionFigure | CopyFigure

# tokens, inputs, outputs of linear layers: from wide to skinny
LAYERS = (
    *((tokens, inputs, outputs) for tokens in (4096, 16384)
      for inputs, outputs in ((1024, 1024), (1024, 4096), (2048, 512), (2048, 2048), (2048, 8192), (8192, 2048),
                              (4096, 1024), (4096, 4096), (4096, 12288), (12288, 4096))),
    (1024, 1024, 4096), (1024, 4096, 4096), (2048, 2048, 8192), (32768, 768, 768), (8192, 768, 3072),
    (2048, 4096, 65536), (4096, 2048, 65536), (8192, 5120, 5120), (32768, 2048, 8192),
)  # fmt: skip
# experts, rows of all of them, inputs, outputs
GROUPS = ((8, 16384, 4096, 14336), (8, 32768, 3072, 8192), (64, 49152, 2048, 1024), (64, 12288, 2048, 1024),
           (128, 65536, 2048, 768), (128, 16384, 2048, 768), (32, 32768, 1024, 2048))  # fmt: skip
FP8_LAYERS = ((16384, 4096, 4096), (16384, 4096, 12288), (8192, 12288, 4096), (8192, 2048, 8192), (16384, 4096, 1024))
# batch, seq, heads, heads of keys, features of a query, of a value
ATTENTIONS = (
    (16, 1024, 16, 16, 64, 64), (8, 2048, 32, 8, 64, 64), (1, 16384, 32, 8, 64, 64), (8, 1024, 16, 8, 128, 128),
    (4, 2048, 16, 16, 128, 128), (4, 4096, 32, 8, 128, 128), (1, 16384, 16, 4, 128, 128), (1, 32768, 8, 2, 128, 128),
    (4, 2048, 16, 16, 96, 96), (2, 4096, 16, 16, 192, 128),
)  # fmt: skip
WINDOWED = (2, 8192, 16, 4, 128, 128)
CAPPED = (2, 8192, 16, 8, 256, 256)  # Gemma 2's heads
COPIES = (2**20, 2**24, 2**26, 2**28)


def gpu_figures(device: torch.device, *, fp8: bool) -> list[tuple[GpuFigure, TimedCalls]]:
    noise = RandomOperands(device)
    figures: list[tuple[GpuFigure, TimedCalls]] = [
        (figure, _product_calls(figure, noise))
        for shape in LAYERS for product in PRODUCTS for figure in [ProductFigure(*shape, product)]
    ]  # fmt: skip
    for experts, rows, inputs, outputs in GROUPS:
        grouped = [ProductFigure(rows, inputs, outputs, product, experts) for product in PRODUCTS]
        figures += [(figure, TimedCalls((_grouped(figure, noise),))) for figure in grouped]
    if fp8:
        figures += [pair for shape in FP8_LAYERS for scaling in SCALINGS for pair in _scaled(shape, scaling, noise)]
    for sizes in ATTENTIONS:
        figures += [(figure, _attention_calls(figure, noise))
                  for figure in (AttentionFigure(*sizes, both) for both in (False, True))]  # fmt: skip
    others = (AttentionFigure(*WINDOWED, True, window=WINDOWED[1] // 2), AttentionFigure(*CAPPED, True, softcap=50.0))
    figures += [(figure, _attention_calls(figure, noise)) for figure in others]
    for size in COPIES:
        figures.append((CopyFigure(size), TimedCalls(tuple(_copy(size, noise) for _ in range(sets_of(size))))))
    return figures


def _product_calls(figure: ProductFigure, noise: RandomOperands) -> TimedCalls:
    rows, inner, columns = figure.rows, figure.inner, figure.columns
    count = sets_of(2 * (rows * inner + inner * columns + rows * columns))
    return TimedCalls(tuple(_product(figure, noise) for _ in range(count)))


def _product(figure: ProductFigure, noise: RandomOperands) -> Callable[[], Tensor]:
    rows, inner, columns = figure.rows, figure.inner, figure.columns
    inputs, weight, gradient = noise(rows, inner), noise(columns, inner), noise(rows, columns)
    if figure.product == "forward":
        return partial(F.linear, inputs, weight)
    return partial(torch.mm, *((gradient, weight) if figure.product == "input" else (gradient.T, inputs)))


def _grouped(figure: ProductFigure, noise: RandomOperands) -> Callable[[], Tensor]:
    rows, inner, columns, groups = figure.rows, figure.inner, figure.columns, figure.matrices
    inputs, weights, gradient = noise(rows, inner), noise(groups, inner, columns), noise(rows, columns)
    ends = (torch.arange(1, groups + 1, device=inputs.device) * (rows // groups)).to(torch.int32)
    if figure.product == "forward":
        return partial(F.grouped_mm, inputs, weights, offs=ends)
    if figure.product == "input":
        return partial(F.grouped_mm, gradient, weights.transpose(1, 2), offs=ends)
    return partial(F.grouped_mm, inputs.T, gradient, offs=ends)


def _scaled(
    shape: tuple[int, int, int], scaling: str, noise: RandomOperands
) -> Iterator[tuple[ProductFigure, TimedCalls]]:
    rows, inner, columns = shape
    inputs = _forms(noise(rows, inner), scaling, gradient=False, stacked=False)
    weights = _forms(noise(columns, inner), scaling, gradient=False, stacked=True)
    gradients = _forms(noise(rows, columns), scaling, gradient=True, stacked=False)
    square = scaling == "block"
    operands: dict[Product, tuple[Any, ...]] = {
        "forward": (*inputs[:2], *weights[:2], square, torch.bfloat16, True),
        "input": (*gradients[:2], *weights[2:], square, torch.bfloat16, False),
        "weight": (*gradients[2:], *inputs[2:], False, torch.bfloat16, False),
    }
    for product, given in operands.items():
        yield ProductFigure(*shape, product, scaling=scaling), TimedCalls((partial(fp8_product, *given),))


def _forms(matrix: Tensor, scaling: str, *, gradient: bool, stacked: bool) -> Any:
    largest: list[Tensor] = []
    if scaling == "row":
        largest = list(fp8_largest([matrix], stacked))
    elif scaling == "tensor":
        largest = [matrix.abs().amax().float()]
    return fp8_cast([matrix], largest, scaling, gradient, stacked, True, True)


def _attention_calls(figure: AttentionFigure, noise: RandomOperands) -> TimedCalls:
    query, key, value = (
        noise(figure.batch, figure.seq, heads, features).requires_grad_()  # also forward: training's kernel
        for heads, features in ((figure.heads, figure.features), (figure.key_heads, figure.features),
                                (figure.key_heads, figure.value_features))
    )  # fmt: skip
    arguments = AttentionArguments(True, figure.window, figure.features**-0.5, softcap=figure.softcap)
    forward = partial(dot_product_attention, query, key, value, arguments)
    if not figure.both:
        return TimedCalls((forward,))
    gradient = noise(figure.batch, figure.seq, figure.heads, figure.value_features)
    return TimedCalls((lambda: torch.autograd.grad(forward(), (query, key, value), gradient),))


def _copy(size: int, noise: RandomOperands) -> Callable[[], Tensor]:
    source = noise(size // 2)
    return partial(torch.empty_like(source).copy_, source)


_TIMES = ("step_seconds", "update_seconds")
_FIGURES_SECONDS, _MIX_SECONDS = 7.0, 0.6


@dataclass(frozen=True)
class GpuSamples:
    """Everything that was measured of one GPU; figures and cases have the same order on all GPUs of a kind."""

    figures: tuple[GpuFigure, ...]
    figures_share: float  # of the time, while they were measured
    mixes: tuple[Mix, ...]
    cases: tuple[CaseSample, ...]


def measure_gpu(
    base: Device, device: torch.device, *, compiles: bool = True, meet: Callable[[], None] = lambda: None
) -> GpuSamples:
    """With ``compiles`` this rank compiles for all GPUs of its host, which ``meet`` before they measure."""
    cases = [case for case in CASES if "fp8" in base.peak or not case.precision.startswith("fp8")]
    compiling = Compiling(cases if compiles else (), device.index or 0)

    def ready() -> None:
        compiling.wait()
        meet()

    figures = gpu_figures(device, fp8="fp8" in base.peak)  # built while others compile
    seconds, share = sustained_seconds([calls for _, calls in figures], device, _FIGURES_SECONDS, ready=ready)
    timed = tuple(replace(figure, seconds=spent) for (figure, _), spent in zip(figures, seconds) if spent)
    del figures
    gc.collect()
    torch.cuda.empty_cache()
    slower = tuple(mixes(device, _MIX_SECONDS))
    return GpuSamples(timed, share, slower, tuple(measured_cases(cases, base, device, lambda text: None)))


def middle_gpu(samples: Sequence[GpuSamples]) -> GpuSamples:
    """The median over devices of every figure."""
    first = samples[0]
    if len(samples) == 1:
        return first

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    figures = tuple(
        replace(same[0], seconds=median([figure.seconds for figure in same]))
        for same in zip(*(gpu.figures for gpu in samples))
    )
    mixed = tuple(
        replace(same[0], share=median([mix.share for mix in same]), seconds=median([mix.seconds for mix in same]))
        for same in zip(*(gpu.mixes for gpu in samples))
    )
    cases = tuple(
        CaseSample(
            same[0].case, median([case.step_seconds for case in same]), median([case.update_seconds for case in same])
        )
        for same in zip(*(gpu.cases for gpu in samples))
    )
    return GpuSamples(figures, median([gpu.figures_share for gpu in samples]), mixed, cases)
