"""Fits the few efficiency constants of each device on the published runs, and says how well they carry over.

Prints, per device, the constants, the in-sample error and the error when a model's rows are left out of the fit (a
table's, on a device with one model).
At most 8 constants per device, each held near its prior; nothing is fitted per model, per row or per source.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardwise.cost.accuracy.runs import PublishedRun, read_runs
from shardwise.cost.step.prediction import predict
from shardwise.spec.hardware import Efficiency
from shardwise.spec.job import Job

TABLE = Path(__file__).parent.parent / "validation" / "training_runs.csv"
PRIOR_WIDTH = 0.25  # a constant 25% off its prior weighs as much as a row 3% off
ROW_WIDTH = 0.03
# Few rows of one model each show experts on H100 and GB200, so the devices share a prior: what they agree on.
EXCHANGE = 0.2


@dataclass(frozen=True)
class Fit:
    """What is fitted on a device, with its prior, and what stays fixed."""

    device: str
    priors: dict[str, float]
    fixed: Efficiency


FITS = (
    Fit(
        "A100-SXM-80GB",
        {"gemm.16": 0.78, "stored_scores_traffic": 1.0, "stage_call_seconds": 5e-4},
        Efficiency(operand_traffic=0.5, elementwise_traffic=1.3, operator_seconds=4e-6, step_seconds=5e-3),
    ),
    Fit(
        "H100-SXM-80GB",
        {"gemm.16": 0.60, "gemm.fp8": 0.72, "attention_backward": 0.60, "elementwise_traffic": 2.0,
         "exchange": EXCHANGE, "overlapped_tp_exposed": 0.2, "step_seconds": 2.5e-2},
        Efficiency(gemm_rolloff=300, attention_forward=0.72, stage_call_seconds=1e-4),
    ),
    # The H100's constants, at the share of its clock that 500 of 700 W leave; FlashAttention-2 as a share of cuDNN's.
    Fit(
        "H100-96GB-HBM2e-500W",
        {"gemm.16": 0.82 * 0.623, "gemm.fp8": 0.82 * 0.741, "older_attention": 0.57},
        Efficiency(gemm_rolloff=300, attention_forward=0.82 * 0.72, attention_backward=0.82 * 0.59,
                   elementwise_traffic=2.37, overlapped_tp_exposed=0.165, stage_call_seconds=1e-4,
                   step_seconds=4.79e-2),
    ),
    Fit(
        "B200-SXM",
        {"gemm.16": 0.48, "attention_backward": 0.40, "operator_seconds": 1.7e-5, "exchange": EXCHANGE},
        Efficiency(attention_forward=0.46),
    ),
    Fit(
        "GB200-NVL72",
        {"gemm.fp8": 0.50, "gemm.fp4": 0.50, "exchange": EXCHANGE},
        Efficiency(attention_forward=0.46, attention_backward=0.40, operator_seconds=1.2e-5,
                   gemm={"bf16": 0.48, "fp16": 0.48, "fp8": 0.5, "fp4": 0.5}),
    ),
)  # fmt: skip


def with_constants(base: Efficiency, constants: dict[str, float]) -> Efficiency:
    gemm = dict(base.gemm)
    plain = {}
    for name, value in constants.items():
        if name == "gemm.16":
            gemm |= {"bf16": min(1.0, value), "fp16": min(1.0, value)}
        elif name.startswith("gemm."):
            gemm[name.removeprefix("gemm.")] = min(1.0, value)
        else:
            plain[name] = min(1.0, value) if name in ("exchange", "expert_gemm", "attention_backward") else value
    return replace(base, gemm=gemm, **plain)  # type: ignore[arg-type]


def on_device(job: Job, efficiency: Efficiency) -> Job:
    return replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, efficiency=efficiency)))


def log_errors(runs: Sequence[PublishedRun], efficiency: Efficiency) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    predicted = [predict(on_device(run.job, efficiency)).step_seconds for run in runs]
    reported = [run.reported_seconds or math.nan for run in runs]
    return np.array([math.log(p / seconds) for p, seconds in zip(predicted, reported)])


def solve(fit: Fit, runs: Sequence[PublishedRun], rounds: int = 6) -> dict[str, float]:
    """Gauss-Newton on log errors with Huber weights, every constant drawn to its prior."""
    names = list(fit.priors)
    steps = np.zeros(len(names))

    def constants(at: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
        return {name: fit.priors[name] * math.exp(step) for name, step in zip(names, at)}

    for _ in range(rounds):
        errors = log_errors(runs, with_constants(fit.fixed, constants(steps)))
        columns = []
        for index in range(len(names)):
            moved = steps.copy()
            moved[index] += 0.02
            columns.append((log_errors(runs, with_constants(fit.fixed, constants(moved))) - errors) / 0.02)
        weights = np.sqrt(np.minimum(1.0, 0.06 / np.maximum(np.abs(errors), 1e-9))) / ROW_WIDTH
        jacobian = np.vstack([np.array(columns).T * weights[:, None], np.eye(len(names)) / PRIOR_WIDTH])
        residual = np.concatenate([errors * weights, steps / PRIOR_WIDTH])
        change = np.linalg.lstsq(jacobian, -residual, rcond=None)[0]
        steps = steps + np.clip(change, -0.3, 0.3)
        if np.max(np.abs(change)) < 1e-3:
            break
    return constants(steps)


def summary(errors: Sequence[float]) -> str:
    absolute = [abs(error) for error in errors]
    return f"mean {np.mean(absolute):.1%}, worst {max(absolute):.1%}, bias {np.mean(errors):+.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="only this one")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--no-leave-out", action="store_true", help="skip the leave-one-model-out fits")
    options = parser.parse_args()
    everything = list(read_runs(TABLE))
    for fit in FITS:
        if options.device not in (None, fit.device):
            continue
        runs = [run for run in everything if run.device == fit.device and not run.set_aside]
        found = solve(fit, runs)
        errors = np.expm1(log_errors(runs, with_constants(fit.fixed, found)))
        print(f"{fit.device}: {len(runs)} rows, {len(found)} constants")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        print(f"  in sample: {summary(errors.tolist())}")
        if options.rows:
            for run, error in zip(runs, errors):
                print(f"    {error:+7.1%}  {run.row_id}")
        if not options.no_leave_out:
            print(f"  one {apart(runs)} left out: {summary(left_out(fit, runs))}", flush=True)
    return 0


def apart(runs: Sequence[PublishedRun]) -> str:
    """What is left out at a time."""
    return "model" if len({run.model_name for run in runs}) > 1 else "table"


def groups(runs: Sequence[PublishedRun]) -> list[set[str]]:
    """Row ids that are left out together."""
    found: dict[str, set[str]] = {}
    for run in runs:
        name = run.model_name if apart(runs) == "model" else run.row.text("locator")
        found.setdefault(name, set()).add(run.row_id)
    return list(found.values())


def left_out(fit: Fit, runs: Sequence[PublishedRun]) -> list[float]:
    """Errors of every model's rows by constants fitted on the other models' rows."""
    errors: list[float] = []
    for group in groups(runs):
        found = solve(fit, [run for run in runs if run.row_id not in group], rounds=4)
        own = [run for run in runs if run.row_id in group]
        errors += np.expm1(log_errors(own, with_constants(fit.fixed, found))).tolist()
    return errors


if __name__ == "__main__":
    sys.exit(main())
