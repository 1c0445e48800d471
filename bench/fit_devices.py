"""Fits the few efficiency constants of each device on the published runs, and says how well they carry over.

    python bench/fit_devices.py                  # all devices: a minute
    python bench/fit_devices.py --device gb200 --rows

Prints, per device or devices of one make, the constants, the error in sample and with a row's model, source or device
left out of the fit (in the first order: bench/left_out.py; ``--refit`` fits anew without each source). A few constants,
each held near its prior; nothing is fitted per model, per row or per source. Those of mixtures are fitted on mixtures,
after the others. The other constants are those of the device's file.

A source is one group of people with one code base, whatever number of releases it printed: all MLPerf rounds of one
vendor's code are one, all releases of Megatron-Bridge are one. One with many rows counts as `SOURCE_ROWS`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from shardwise.accuracy.runs import PublishedRun
from shardwise.accuracy.scores import published_runs
from shardwise.accuracy.table import TRAINING_RUNS
from shardwise.cost.step.prediction import predict
from shardwise.spec import presets
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job
from shardwise.uncertainty.residuals import kind_of

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
ROW_WIDTH = 0.03  # an error of a row weighs as much as a constant that is off its prior by its width
TAIL = 0.08  # rows further off count less and less (Cauchy's weights)
SOURCE_ROWS = 6


class Prior(NamedTuple):
    """What a constant is without rows, and by what share it may well be off."""

    value: float
    width: float = 0.25


@dataclass(frozen=True, eq=False)
class Fit:
    """Constants that some devices share, with their priors, fitted on their dense models, mixtures or int8 runs."""

    devices: tuple[str, ...]
    priors: Mapping[str, Prior]
    kind: str = "dense"

    def covers(self, run: PublishedRun) -> bool:
        own = run.job.training.precision if self.kind == "int8" else kind_of(run.job.model)
        return run.source.fitted and device_of(run) in self.devices and own == self.kind


# Matmuls: the best of a search over shapes (stas00/ml-engineering 744d01e, compute/accelerator/README.md), less what a
# long step at the power limit loses. Attention of A100: arXiv 2307.08691. Spread: Sinha et al. 2022 (arXiv 2208.11035)
# find 8% in machines that nobody screens; screened ones are tighter.
_SPREAD = {"device_spread": Prior(0.01)}
_MIXTURES = {"expert_gemm": Prior(0.9, 0.3), "expert_rolloff": Prior(500, 0.7), "routing_seconds": Prior(5e-4, 0.7),
             "routing_traffic": Prior(4.0, 0.5)}  # fmt: skip
FITS = (
    Fit(("a100-80gb",), {"gemm.16": Prior(0.78), "stored_scores_traffic": Prior(1.0), "stage_call_seconds": Prior(5e-4),
                         "attention_backward": Prior(0.6), "elementwise_traffic": Prior(1.3), **_SPREAD,
                         "layer_jitter": Prior(0.02)}),
    Fit(("h100-sxm",), {"gemm.16": Prior(0.65), "gemm.fp8": Prior(0.74), "attention_backward": Prior(0.6),
                        "elementwise_traffic": Prior(2.0), "overlapped_tp_exposed": Prior(0.2),
                        "step_seconds": Prior(2.5e-2), **_SPREAD, "layer_jitter": Prior(0.02)}),
    # The H100's constants, at the share of its clock that 500 of 700 W leave; FlashAttention-2 as a share of cuDNN's.
    Fit(("h100-sxm-96gb-hbm2e",), {"gemm.16": Prior(0.82 * 0.65), "gemm.fp8": Prior(0.82 * 0.74),
                                   "older_attention": Prior(0.57)}),
    Fit(("b200",), {"gemm.16": Prior(0.50), "gemm.fp8": Prior(0.52), "gemm.fp4": Prior(0.5),
                    "attention_backward": Prior(0.4), "operator_seconds": Prior(1.2e-5), **_SPREAD}),
    Fit(("gb200",), {"gemm.16": Prior(0.50), "gemm.fp8": Prior(0.52), "gemm.fp4": Prior(0.5), **_SPREAD}),
    Fit(("b300", "gb300"), {"gemm.16": Prior(0.55), "gemm.fp8": Prior(0.6, 0.4), "gemm.fp4": Prior(0.6, 0.4),
                            "attention_backward": Prior(0.4)}),
    Fit(("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"), {"gemm.16": Prior(0.85), "operand_traffic": Prior(0.3),
        "attention_backward": Prior(0.4), "attention_forward": Prior(0.4), **_SPREAD}),
    Fit(("ascend-910b",), {"gemm.16": Prior(0.65), "attention_backward": Prior(0.5), "attention_forward": Prior(0.6),
                           "operator_seconds": Prior(1e-5), "elementwise_traffic": Prior(1.5)}),
    Fit(("mi300x", "mi325x", "mi350x", "mi355x"), {"attention_backward": Prior(0.41)}),
    *(Fit((one,), {"gemm.int8": Prior(0.55, 0.4)}, "int8") for one in ("tpu-v5e", "tpu-v5p", "tpu-v6e")),
    Fit(("gaudi2",), {"gemm.fp8": Prior(0.7)}),
    Fit(("h100-sxm", "b200", "gb200", "b300", "gb300"), _MIXTURES, "moe"),
    Fit(("ascend-910b",), _MIXTURES, "moe"),
)  # fmt: skip

_SHARES = {one.name for one in fields(Efficiency) if one.metadata.get("maximum") == 1}


@cache
def efficiency_of(device: str) -> Efficiency:
    """As the device's file has it."""
    return presets.load("device", Device, device).efficiency


def constant(efficiency: Efficiency, name: str) -> float:
    """A constant by its name in the fit."""
    if name.startswith("gemm."):
        return efficiency.gemm_share(name.removeprefix("gemm.").replace("16", "bf16"))
    return float(getattr(efficiency, name))


def with_constants(base: Efficiency, constants: Mapping[str, float]) -> Efficiency:
    gemm = dict(base.gemm)
    plain = {}
    for name, value in constants.items():
        if name == "gemm.16":
            gemm |= {"bf16": min(1.0, value), "fp16": min(1.0, value)}
        elif name.startswith("gemm."):
            gemm[name.removeprefix("gemm.")] = min(1.0, value)
        else:
            plain[name] = min(1.0, value) if name in _SHARES else value
    return replace(base, gemm=gemm, **plain)  # type: ignore[arg-type]


def on_device(job: Job, efficiency: Efficiency) -> Job:
    return replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, efficiency=efficiency)))


def log_errors(runs: Sequence[PublishedRun], constants: Mapping[str, float], base: Efficiency | None = None) -> Array:
    """With these constants, and the others of ``base`` or of each run's own device."""
    predicted = [
        predict(on_device(run.job, with_constants(base or efficiency_of(device_of(run)), constants))).step_seconds
        for run in runs
    ]
    reported = [run.reported_seconds or math.nan for run in runs]
    return np.array([math.log(p / seconds) for p, seconds in zip(predicted, reported)])


def slopes(
    runs: Sequence[PublishedRun], constants: Mapping[str, float], errors: Array, base: Efficiency | None = None
) -> Array:
    """How log errors change with the logarithm of each constant, a column each: seen downwards, as shares end at 1."""
    moved = [{**constants, name: value * math.exp(-0.02)} for name, value in constants.items()]
    columns = [(errors - log_errors(runs, one, base)) / 0.02 for one in moved]
    return np.array(columns).reshape(len(columns), len(runs)).T


def improved(errors: Array, slope: Array, off_prior: Array, widths: Array, weights: Array) -> Array:
    """The step of the constants' logarithms that minimises the errors, were these linear.

    Least squares with Cauchy's weights. ``off_prior`` is how far the logarithms are from their priors now.
    """
    scale = weights / np.sqrt(1 + (errors / TAIL) ** 2) / ROW_WIDTH
    jacobian = np.vstack([slope * scale[:, None], np.diag(1 / widths)])
    residual = np.concatenate([errors * scale, off_prior / widths])
    step: Array = np.linalg.lstsq(jacobian, -residual, rcond=None)[0]
    return step


def widths_of(fit: Fit) -> Array:
    return np.array([prior.width for prior in fit.priors.values()])


def source_weights(runs: Sequence[PublishedRun]) -> Array:
    count = Counter(run.source.name for run in runs)
    return np.array([math.sqrt(min(1.0, SOURCE_ROWS / count[run.source.name])) for run in runs])


def solve(fit: Fit, runs: Sequence[PublishedRun], rounds: int = 6) -> dict[str, float]:
    """Gauss-Newton on log errors, every constant drawn to its prior, from the priors on."""
    weights, logs = source_weights(runs), np.zeros(len(fit.priors))
    shares = [name.startswith("gemm.") or name in _SHARES for name in fit.priors]
    highest = [-math.log(prior.value) if share else math.inf for prior, share in zip(fit.priors.values(), shares)]
    for _ in range(rounds):
        constants = {name: prior.value * math.exp(log) for (name, prior), log in zip(fit.priors.items(), logs)}
        errors = log_errors(runs, constants)
        step = improved(errors, slopes(runs, constants, errors), logs, widths_of(fit), weights)
        before, logs = logs, np.minimum(logs + np.clip(step, -0.4, 0.4), highest)
        if np.max(np.abs(logs - before)) < 2e-3:
            break
    return {name: prior.value * math.exp(log) for (name, prior), log in zip(fit.priors.items(), logs)}


def fitted_runs() -> list[PublishedRun]:
    """Every published run that has a time and is not set aside."""
    return with_time(published_runs(TRAINING_RUNS)[0])


def with_time(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    return [run for run in runs if run.reported_seconds and not run.set_aside]


def device_of(run: PublishedRun) -> str:
    return run.job.cluster.device.name


def summary(errors: Sequence[float]) -> str:
    sizes = np.abs(np.expm1(errors))
    return f"mean {np.mean(sizes):.1%}, median {np.median(sizes):.1%}, bias {np.mean(np.expm1(errors)):+.1%}"


def main() -> int:
    from left_out import LeftOut

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="only this one")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--refit", action="store_true", help="fit anew without each source, not in the first order")
    options = parser.parse_args()
    runs = fitted_runs()
    apart = LeftOut(runs, FITS)
    for fit in FITS:
        if options.device is not None and options.device not in fit.devices:
            continue
        own = [run for run in runs if fit.covers(run)]
        found = solve(fit, own)
        errors = log_errors(own, found)
        print(f"{', '.join(fit.devices)}, {fit.kind}: {len(own)} rows, {len({run.source.name for run in own})} sources")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        print(f"  in sample: {summary(errors.tolist())}")
        for what in ("model", "source", "device"):
            without = apart.each(what)
            print(f"  {what} left out: {summary([without[run.row_id] for run in own])}", flush=True)
        if options.refit:
            print(f"  source left out, fitted anew: {summary(refitted(fit, own))}", flush=True)
        if options.rows:
            without = apart.each("source")
            for run, error in zip(own, errors):
                print(f"    {math.expm1(error):+7.1%} {math.expm1(without[run.row_id]):+7.1%}  {run.row_id}")
    return 0


def refitted(fit: Fit, runs: Sequence[PublishedRun]) -> list[float]:
    """Log errors of the rows of each source that others remain beside, by constants fitted on these alone."""
    errors: list[float] = []
    for source in {run.source.name for run in runs}:
        others = [run for run in runs if run.source.name != source]
        if others:
            constants = solve(fit, others, rounds=4)
            errors += log_errors([run for run in runs if run.source.name == source], constants).tolist()
    return errors


if __name__ == "__main__":
    sys.exit(main())
