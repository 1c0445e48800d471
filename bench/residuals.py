"""Writes src/shardwise/cost/accuracy/residuals.csv: how far predictions are off, where error bars come from.

    python bench/residuals.py            # after a change of prices, or of the rows in validation/
    python bench/residuals.py --check    # is the file what the rows give today?

Step time per device, memory per software stack (bytes do not depend on the device, but on what a framework saves),
dense models and mixtures of experts apart. Rows that are set aside are not counted. ``band`` holds 80% of the rows;
where a device's constants are fitted, it is taken over errors with the row's own model left out of the fit (its own
table, on a device with one model). "ratio" lines are about two strategies of one job: how far their predicted ratio is
off. What a device's constants miss is missed in both, so that all devices are in one line.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import combinations

import numpy as np

from fit_devices import FITS, PRIOR_WIDTH, ROW_WIDTH, TABLE, Fit, groups, log_errors, with_constants
from shardwise.cost.accuracy.residuals import COVERAGE, FILE, ONE_JOB, Residuals, kind_of, residuals
from shardwise.cost.accuracy.runs import PublishedRun, read_runs
from shardwise.cost.accuracy.scores import score
from shardwise.spec.hardware import Efficiency

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
TOLERANCE = 1e-3  # of an error, between machines: linear algebra rounds differently


@dataclass(frozen=True)
class Error:
    """One row's error as scored, and with its model left out of the fit."""

    model: str
    scored: float
    left_out: float | None = None


def band(errors: Sequence[float]) -> float:
    """The ⌈COVERAGE·(n + 1)⌉-th smallest size, which holds as much of rows to come as the percentile does of these.

    Lei et al. 2018, "Distribution-free predictive inference for regression", JASA 113(523). Of fewer than 4, the
    largest.
    """
    rank = math.ceil(COVERAGE * (len(errors) + 1))
    return sorted(map(abs, errors))[min(rank, len(errors)) - 1]


def summary(what: str, of: str, kind: str, errors: Sequence[Error]) -> Residuals:
    scored = [error.scored for error in errors]
    left_out = [error.left_out for error in errors if error.left_out is not None]
    return Residuals(
        what,
        of,
        kind,
        len(errors),
        len({error.model for error in errors}),
        round(sum(map(abs, scored)) / len(scored), 4),
        round(sum(scored) / len(scored), 4),
        round(sum(map(abs, left_out)) / len(left_out), 4) if left_out else None,
        round(band(left_out or scored), 4),
    )


def shipped(efficiency: Efficiency, name: str) -> float:
    """A constant as the device's file gives it, by its name in the fit."""
    data_type = {"gemm.16": "bf16"}.get(name, name.removeprefix("gemm."))
    return efficiency.gemm[data_type] if name.startswith("gemm.") else float(getattr(efficiency, name))


def left_out_errors(fit: Fit, runs: Sequence[PublishedRun]) -> list[float]:
    """Errors of every model's rows by constants fitted on the other models' rows, in the first order.

    Log errors are near linear in the logarithms of the constants, so one slope around the shipped constants replaces a
    refit for every model: 2 seconds instead of 75. Against `left_out` of bench/fit_devices.py the bands of dense models
    differ by 0.03 points, those of mixtures of experts come out up to 2 points wider.
    """
    efficiency = runs[0].job.cluster.device.efficiency
    at = {name: shipped(efficiency, name) for name in fit.priors}
    errors = log_errors(runs, efficiency)
    moved = [with_constants(efficiency, {name: value * math.exp(0.02)}) for name, value in at.items()]
    slopes = np.array([(log_errors(runs, one) - errors) / 0.02 for one in moved]).T
    start = np.array([math.log(at[name] / prior) for name, prior in fit.priors.items()])
    result = np.zeros(len(runs))
    for group in groups(runs):
        own = np.array([run.row_id in group for run in runs])
        change = _refit(errors[~own], slopes[~own], start)
        result[own] = np.expm1(errors[own] + slopes[own] @ change)
    return [float(error) for error in result]


def _refit(errors: Array, slopes: Array, start: Array) -> Array:
    """The change of the constants' logarithms that bench/fit_devices.py's `solve` would make, were errors linear."""
    change = np.zeros(len(start))
    for _ in range(30):
        now = errors + slopes @ change
        weights = np.sqrt(np.minimum(1.0, 0.06 / np.maximum(np.abs(now), 1e-9))) / ROW_WIDTH
        jacobian = np.vstack([slopes * weights[:, None], np.eye(len(start)) / PRIOR_WIDTH])
        residual = np.concatenate([now * weights, (start + change) / PRIOR_WIDTH])
        change = change + np.linalg.lstsq(jacobian, -residual, rcond=None)[0]
    return change


def table() -> Iterator[Residuals]:
    runs = [run for run in read_runs(TABLE) if not run.set_aside and run.reported_seconds]
    scores = {run.row_id: score(run) for run in runs}
    left_out: dict[str, float] = {}
    for fit in FITS:
        own = [run for run in runs if run.device == fit.device]
        left_out |= zip((run.row_id for run in own), left_out_errors(fit, own))
    times = [
        (run.job.cluster.device.name, kind_of(run.job.model),
         Error(run.model_name, of_time, left_out.get(run.row_id)))
        for run in runs
        if (of_time := scores[run.row_id].time_error) is not None
    ]  # fmt: skip
    yield from _grouped("time", times)
    yield from _grouped("ratio", _ratios(runs, {name: one.time_error or 0.0 for name, one in scores.items()}, left_out))
    memories = [
        (run.job.stack.name, kind_of(run.job.model), Error(run.model_name, error))
        for run in runs
        if (error := scores[run.row_id].memory_error) is not None
    ]
    yield from _grouped("memory", memories)


def _ratios(
    runs: Sequence[PublishedRun], scored: dict[str, float], left_out: dict[str, float]
) -> Iterator[tuple[str, str, Error]]:
    """Every two rows of one job that differ in their strategy: slower over faster, predicted against reported."""
    jobs: dict[tuple[object, ...], list[PublishedRun]] = {}
    for run in runs:
        jobs.setdefault(_job_and_software(run), []).append(run)
    for own in jobs.values():
        for one, other in combinations(own, 2):
            if one.job.strategy == other.job.strategy:
                continue
            slow, fast = sorted((one, other), key=lambda run: -(run.reported_seconds or 0.0))
            both = (_ratio(errors, slow.row_id, fast.row_id) for errors in (scored, {**scored, **left_out}))
            yield ONE_JOB, kind_of(one.job.model), Error(one.model_name, *both)


def _ratio(errors: dict[str, float], slow: str, fast: str) -> float:
    return (1 + errors[slow]) / (1 + errors[fast]) - 1


def _job_and_software(run: PublishedRun) -> tuple[object, ...]:
    """What two rows share that differ in the strategy alone; the rows of another container ran other software."""
    job, locator = run.job, run.row.text("locator")
    release = locator if "container" in locator else ""
    machine = (job.cluster.device.name, job.cluster.devices)
    return (*machine, job.model, job.training, job.sequences, job.stack.name, run.source.name, release)


def _grouped(what: str, errors: Iterable[tuple[str, str, Error]]) -> Iterator[Residuals]:
    groups: dict[tuple[str, str], list[Error]] = {}
    for of, kind, error in errors:
        groups.setdefault((of, kind), []).append(error)
    for (of, kind), own in sorted(groups.items()):
        yield summary(what, of, kind, own)


def text(lines: Iterable[Residuals]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Residuals)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in lines)
    return out.getvalue()


def differences(lines: Iterable[Residuals]) -> Iterator[str]:
    """One line for every group that the file does not have as it is today."""
    today = {(line.what, line.of, line.kind): line for line in lines}
    for key in today.keys() | residuals().keys():
        kept, now = residuals().get(key), today.get(key)
        if kept is None or now is None or not all(map(_same, astuple(kept), astuple(now))):
            yield f"{' '.join(key)}: {now}, the file has {kept}"


def _same(kept: object, now: object) -> bool:
    if isinstance(kept, float) and isinstance(now, float):
        return abs(kept - now) <= TOLERANCE
    return kept == now


def main() -> int:
    lines = list(table())
    if "--check" in sys.argv:
        changed = list(differences(lines))
        print("\n".join(changed) or f"{FILE.name} is up to date")
        return int(bool(changed))
    FILE.write_text(text(lines), encoding="utf-8")
    print(text(lines), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
