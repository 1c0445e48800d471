"""Fits the few efficiency constants of each device on the published runs, and says how well they carry over.

    python bench/fit_devices.py                  # all devices: a minute
    python bench/fit_devices.py --device gb200 --rows

Prints, per device, the constants, the error in sample and with a row's model, source or device left out of the fit
(in the first order: bench/left_out.py; ``--refit`` fits anew without each source). At most 9 constants per device, each
held near its prior; nothing is fitted per model, per row or per source. The other constants are those of the device's
file.

A source is one group of people with one code base, whatever number of releases it printed: all MLPerf rounds of one
vendor's code are one, all releases of Megatron-Bridge are one. One with many rows counts as `SOURCE_ROWS`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from shardwise.cost.accuracy.runs import PublishedRun
from shardwise.cost.accuracy.scored import published_runs
from shardwise.cost.accuracy.table import TRAINING_RUNS
from shardwise.cost.step.prediction import predict
from shardwise.spec import presets
from shardwise.spec.hardware import Device, Efficiency
from shardwise.spec.job import Job

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# Chosen together, by the mean error of rows whose source is left out.
PRIOR_WIDTH = 0.12  # a constant 12% off its prior weighs as much as a row 3% off
ROW_WIDTH = 0.03
TAIL = 0.04  # errors beyond count by their size, not by its square (Huber 1964)
SOURCE_ROWS = 6


@dataclass(frozen=True)
class Fit:
    """What is fitted on a device, with its prior."""

    device: str
    priors: Mapping[str, float]


FITS = (
    Fit("a100-80gb", {"gemm.16": 0.78, "stored_scores_traffic": 1.0, "stage_call_seconds": 5e-4}),
    Fit("h100-sxm", {"gemm.16": 0.60, "gemm.fp8": 0.72, "attention_backward": 0.60, "elementwise_traffic": 2.0,
                     "exchange": 0.2, "overlapped_tp_exposed": 0.2, "step_seconds": 2.5e-2}),
    # The H100's constants, at the share of its clock that 500 of 700 W leave; FlashAttention-2 as a share of cuDNN's.
    Fit("h100-sxm-96gb-hbm2e", {"gemm.16": 0.82 * 0.623, "gemm.fp8": 0.82 * 0.741, "older_attention": 0.57}),
    Fit("b200", {"gemm.16": 0.48, "attention_backward": 0.40, "operator_seconds": 1.7e-5, "exchange": 0.2}),
    Fit("gb200", {"gemm.fp8": 0.50, "gemm.fp4": 0.50, "exchange": 0.2}),
)  # fmt: skip

_SHARES = {one.name for one in fields(Efficiency) if one.metadata.get("maximum") == 1}


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


def log_errors(runs: Sequence[PublishedRun], efficiency: Efficiency) -> Array:
    predicted = [predict(on_device(run.job, efficiency)).step_seconds for run in runs]
    reported = [run.reported_seconds or math.nan for run in runs]
    return np.array([math.log(p / seconds) for p, seconds in zip(predicted, reported)])


def slopes(runs: Sequence[PublishedRun], base: Efficiency, constants: Mapping[str, float], errors: Array) -> Array:
    """How the log errors change with the logarithm of each constant, one column each."""
    moved = [with_constants(base, {name: value * math.exp(0.02)}) for name, value in constants.items()]
    return np.array([(log_errors(runs, one) - errors) / 0.02 for one in moved]).T


def improved(errors: Array, slope: Array, off_prior: Array, weights: Array) -> Array:
    """The step of the constants' logarithms that minimises the errors, were these linear: least squares, Huber's tails.

    ``off_prior`` is how far the logarithms are from their priors now.
    """
    huber = np.sqrt(np.minimum(1.0, TAIL / np.maximum(np.abs(errors), 1e-9)))
    scale = weights * huber / ROW_WIDTH
    jacobian = np.vstack([slope * scale[:, None], np.eye(len(off_prior)) / PRIOR_WIDTH])
    residual = np.concatenate([errors * scale, off_prior / PRIOR_WIDTH])
    step: Array = np.linalg.lstsq(jacobian, -residual, rcond=None)[0]
    return step


def source_weights(runs: Sequence[PublishedRun]) -> Array:
    count = Counter(run.source.name for run in runs)
    return np.array([math.sqrt(min(1.0, SOURCE_ROWS / count[run.source.name])) for run in runs])


def solve(fit: Fit, runs: Sequence[PublishedRun], rounds: int = 6) -> dict[str, float]:
    """Gauss-Newton on log errors with Huber's weights, every constant drawn to its prior, from the priors on."""
    base, weights = efficiency_of(fit.device), source_weights(runs)
    logs = np.zeros(len(fit.priors))
    for _ in range(rounds):
        constants = {name: prior * math.exp(log) for (name, prior), log in zip(fit.priors.items(), logs)}
        here = with_constants(base, constants)
        errors = log_errors(runs, here)
        step = np.clip(improved(errors, slopes(runs, here, constants, errors), logs, weights), -0.3, 0.3)
        logs = logs + step
        if np.max(np.abs(step)) < 1e-3:
            break
    return {name: prior * math.exp(log) for (name, prior), log in zip(fit.priors.items(), logs)}


def fitted_runs() -> list[PublishedRun]:
    """Every published run that has a time and is not set aside."""
    runs, _ = published_runs(TRAINING_RUNS)
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
        if options.device not in (None, fit.device):
            continue
        own = [run for run in runs if device_of(run) == fit.device]
        found = solve(fit, own)
        errors = log_errors(own, with_constants(efficiency_of(fit.device), found))
        print(f"{fit.device}: {len(own)} rows, {len({run.source.name for run in own})} sources")
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
            own = [run for run in runs if run.source.name == source]
            errors += log_errors(own, with_constants(efficiency_of(fit.device), constants)).tolist()
    return errors


if __name__ == "__main__":
    sys.exit(main())
