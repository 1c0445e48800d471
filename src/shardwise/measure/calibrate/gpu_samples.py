"""Measures one GPU: kernels one by one on a hot card, what its power limit does, and whole steps of small models."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.measure.calibrate.ahead import Compiling
from shardwise.measure.calibrate.gpu_figures import GpuFigure, gpu_figures
from shardwise.measure.calibrate.steps import CASES, CaseSample, measured_cases
from shardwise.measure.calibrate.sustained import Mix, mixes, sustained_seconds
from shardwise.spec.hardware import Device

_TIMES = ("step_seconds", "update_seconds")
_FIGURES_SECONDS, _MIX_SECONDS = 7.0, 0.6


@dataclass(frozen=True)
class GpuSamples:
    """All that was measured of one GPU; figures and cases stand in the same order for every one of its kind."""

    figures: tuple[GpuFigure, ...]
    figures_share: float  # of the time, while they were measured
    mixes: tuple[Mix, ...]
    cases: tuple[CaseSample, ...]


def measure_gpu(
    base: Device, device: torch.device, *, compiles: bool = True, meet: Callable[[], None] = lambda: None
) -> GpuSamples:
    """``compiles``: for all GPUs of its host, which ``meet`` before they measure."""
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
