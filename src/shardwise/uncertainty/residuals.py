"""Error bars: how far the predictions of published runs are off, as `bench/residuals.py` writes it beside this file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple

from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.uncertainty.known_errors import KINDS, Band, KnownErrors, RunError, Standing, quantile, weighed

FILE = Path(__file__).with_name("residuals.csv")
COVERAGE = 0.8  # share of the rows within a bar
# Of memory a source is a framework, and three quarters of all rows are of one. So many of its rows count that the share
# of frameworks' rows beyond a quantile is its risk, each framework left out in turn: 18%, 10%, 4% at 20%, 10%, 5%.
_MOST_OF_A_FRAMEWORK = 12.0


class Residuals(NamedTuple):  # a thousand of them are read before the first bar is printed
    """One published row, of step time or of memory: predicted / reported − 1 as scored, and with something left out.

    What is left out of the fit is the row's model, its source or its device. Nothing is fitted on memory: its error is
    the same in all columns. ``fitted``: the device has constants of its own.
    """

    what: str
    row_id: str
    source: str
    device: str
    kind: str
    stack: str
    devices: int
    fitted: bool
    job: str
    in_sample: float
    left_out_model: float
    left_out_source: float
    left_out_device: float

    @property
    def standing(self) -> Standing:
        return Standing(self.device, self.kind, self.stack, self.devices)


@dataclass(frozen=True)
class ErrorBar:
    """Where the truth lies beside a prediction, relative to it: −0.05 is 5% less. ``basis`` says how that is known.

    The memory is that of tensors, without the framework's allowance. ``time_of`` and ``memory_of`` are the classes of
    published runs that the bars are of.
    """

    time_low: float
    time_high: float
    memory_low: float
    memory_high: float
    basis: str
    time_of: str
    memory_of: str


def error_bar(job: Job) -> ErrorBar:
    """The bars of a predicted step time and of a predicted memory."""
    return _bar(standing_of(job))


@cache
def _bar(standing: Standing) -> ErrorBar:
    time, memory = known_errors().band(standing, COVERAGE), memory_band(standing)
    basis = f"step time: {_runs(time)} from {_sources(time)} not used in the fit; memory: {_runs(memory)}"
    return ErrorBar(*_truth(time), *_truth(memory), basis, time.of, memory.of)


def memory_quantile(job: Job, risk: float) -> float:
    """The factor on a predicted memory that the true one exceeds with probability ``risk`` at most."""
    return _memory_quantile(standing_of(job), risk)


@cache
def _memory_quantile(standing: Standing, risk: float) -> float:
    return math.exp(_of_memory(standing, 1 - risk, lambda error: -error, memory_errors())[0])


def memory_band(standing: Standing, errors: Sequence[RunError] | None = None) -> Band:
    """Of memory goes by the framework: bytes do not depend on the device, but on what the software keeps."""
    width, rows, of = _of_memory(standing, COVERAGE, abs, memory_errors() if errors is None else errors)
    return Band(width, len(rows), len({row.source for row in rows}), of)


def _of_memory(
    standing: Standing, share: float, size: Callable[[float], float], errors: Sequence[RunError]
) -> tuple[float, Sequence[RunError], str]:
    """What a ``share`` of the sizes of errors does not exceed, the rows it is of, and words for these.

    Rows of the job's framework and kind of model, or of both kinds. Where these are so few that the quantile is beyond
    the largest of them, rows of all frameworks, and no less than the largest of its own.
    """
    known = [row for row in errors if row.standing.stack == standing.stack]
    kind = [row for row in known if row.standing.kind == standing.kind]
    for rows, of in ((kind, KINDS[standing.kind]), (known, "all models")):
        if share * (len(rows) + 1) <= len(rows) + 1e-9:
            return quantile([(size(row.error), 1.0) for row in rows], share), rows, f"{standing.stack}, {of}"
    of_all = quantile([(size(row.error), weight) for row, weight in weighed(errors, _MOST_OF_A_FRAMEWORK)], share)
    return max([of_all, *(size(row.error) for row in known)]), errors, "all frameworks"


PRINTED_DIGITS = 3  # of a share of time: what is within noise is decided, and printed, to 0.1%


@dataclass(frozen=True)
class Noise:
    """How far the predicted ratio of two strategies' times may be off, as a share. ``basis`` says how that is known."""

    share: float
    basis: str


def noise_of(job: Job) -> Noise:
    """Of strategies of one job: closer than this, the prediction cannot tell which is faster.

    Narrower than two error bars: what a device's constants miss is missed in both.
    """
    return _noise(kind_of(job.model))


@cache
def _noise(kind: str) -> Noise:
    pairs = [
        abs(first.error - second.error)
        for first, second in pairs_of_one_job(known_errors().errors)
        if first.standing.kind == kind
    ]
    if len(pairs) < 1 / (1 - COVERAGE) and kind != "dense":
        dense = _noise("dense")
        return Noise(dense.share, f"too few such pairs of {KINDS[kind]}: {dense.basis}")
    share = math.expm1(quantile([(difference, 1.0) for difference in pairs], COVERAGE))
    basis = f"{COVERAGE:.0%} of {len(pairs)} pairs of published runs ({KINDS[kind]}) that differ in the strategy alone"
    return Noise(round(share, PRINTED_DIGITS), basis)


def pairs_of_one_job(errors: Iterable[RunError]) -> list[tuple[RunError, RunError]]:
    """Every two rows that differ in the strategy alone."""
    jobs: dict[str, list[RunError]] = {}
    for error in errors:
        if error.job:
            jobs.setdefault(error.job, []).append(error)
    return [pair for own in jobs.values() for pair in combinations(own, 2)]


def kind_of(model: Model) -> str:
    return "moe" if model.moe else "dense"


def standing_of(job: Job) -> Standing:
    return Standing(job.cluster.device.name, kind_of(job.model), job.stack.base, job.cluster.devices)


def _truth(band: Band) -> tuple[float, float]:
    """|log(predicted / true)| ≤ width, solved for true / predicted − 1."""
    return math.expm1(-band.width), math.expm1(band.width)


def _runs(band: Band) -> str:
    return f"{band.of}: {COVERAGE:.0%} of {band.rows} runs"


def _sources(band: Band) -> str:
    return "1 source" if band.sources == 1 else f"{band.sources} sources"


# -- the file --------------------------------------------------------------------------------------------------


@cache
def residuals() -> tuple[Residuals, ...]:
    """Every line of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        lines = islice(csv.reader(file), 1, None)
        return tuple(
            Residuals(
                what, row_id, source, device, kind, stack, int(devices), fitted == "True", job, *map(float, errors)
            )
            for what, row_id, source, device, kind, stack, devices, fitted, job, *errors in lines
        )


@cache
def known_errors() -> KnownErrors:
    """Errors of step time with each row's source left out of the fit."""
    lines = [line for line in residuals() if line.what == "time"]
    fitted = frozenset(line.device for line in lines if line.fitted)
    return KnownErrors([run_error(line, line.left_out_source) for line in lines], fitted)


@cache
def left_out_errors() -> dict[str, float]:
    """Errors of step time with a row's source left out of the fit, by the row's name."""
    return {line.row_id: line.left_out_source for line in residuals() if line.what == "time"}


@cache
def memory_errors() -> tuple[RunError, ...]:
    return tuple(run_error(line, line.left_out_source) for line in residuals() if line.what == "memory")


def run_error(line: Residuals, error: float) -> RunError:
    return RunError(line.row_id, line.source, line.standing, line.job, math.log1p(error))
