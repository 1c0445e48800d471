"""Measures one GPU: kernels one by one on a hot card, what its power limit does, and whole steps of small models.

The kernels are matmuls of many shapes, of experts and in FP8, attention, and copies.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.fp8.operators import fp8_cast, fp8_largest, fp8_product
from shardwise.measure.calibrate.steps import CASES, CaseSample, Compiling, measured_cases
from shardwise.measure.calibrate.sustained import Mix, RandomOperands, TimedCalls, mixes, sets_of, sustained_seconds
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.spec.efficiency import SCALINGS
from shardwise.spec.hardware import Device

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
