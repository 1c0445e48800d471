"""Error bars: how far the predictions of published runs are off, as `bench/residuals.py` writes it beside this file.

Every error is that of a row whose source was left out of the fit, so a row stands to the other sources as a new job
stands to all: its device may be fitted on none of them, its framework and its number of devices may be in none. A band
holds a share of the errors of rows that stand as far away as the job does, with as many of the rest on either side
(conformal prediction: Lei et al. 2018, JASA 113(523)). Rows of one source are not independent, so that a source counts
as `MOST_OF_A_SOURCE` rows at most (Dunn, Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer
hierarchical models", JASA 118(544)).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple

from shardwise.spec import presets
from shardwise.spec.job import Job
from shardwise.spec.model import Model

MOST_OF_A_SOURCE = 10.0
ENOUGH_ROWS, ENOUGH_SOURCES = 15, 3
KINDS = {"dense": "dense", "moe": "mixtures"}
STAND_INS = ("pytorch", "pytorch-compiled")


class Standing(NamedTuple):
    """What of a job decides how well it is known."""

    device: str
    kind: str
    stack: str
    devices: int


class RunError(NamedTuple):
    """Predicted over reported, as a logarithm, of one row whose source is in no fit behind the prediction.

    ``job`` is the same for rows that differ in the strategy alone, empty for a row without such another.
    """

    row_id: str
    source: str
    standing: Standing
    job: str
    error: float


@dataclass(frozen=True)
class Band:
    """The error is from ``low`` to ``high`` for the stated share of ``rows`` from ``sources``; ``of`` says which these
    are. No error at all is always inside."""

    low: float
    high: float
    rows: int
    sources: int
    of: str

    @property
    def width(self) -> float:
        """Half of what it spans."""
        return (self.high - self.low) / 2

    def holds(self, error: float) -> bool:
        return self.low <= error <= self.high

    def at_least(self, other: Band) -> Band:
        """Spans both, in its own words."""
        return replace(self, low=min(self.low, other.low), high=max(self.high, other.high))

    def and_also(self, other: Band) -> Band:
        """Spans both, in the words of what makes it wider."""
        both = self.at_least(other)
        return self if both == self else replace(other, low=both.low, high=both.high)


class KnownErrors:
    """Errors of rows, each with its source left out of the fit; ``fitted`` devices have constants of their own."""

    def __init__(self, errors: Iterable[RunError], fitted: frozenset[str]) -> None:
        self.errors = tuple(errors)
        self.fitted = fitted

    # -- how far a job is from all rows, and a row from those of other sources -------------------------------

    @cached_property
    def _largest(self) -> dict[str, dict[str, int]]:
        """The most devices of a row: by kind of device, then by source."""
        largest: dict[str, dict[str, int]] = {}
        for error in self.errors:
            of_device = largest.setdefault(error.standing.device, {})
            of_device[error.source] = max(error.standing.devices, of_device.get(error.source, 0))
        return largest

    @cached_property
    def _stacks(self) -> dict[str, set[str]]:
        sources: dict[str, set[str]] = {}
        for error in self.errors:
            sources.setdefault(error.standing.stack, set()).add(error.source)
        return sources

    def largest(self, device: str, besides: str = "") -> int:
        """The most devices of this kind in any row, those of the source ``besides`` left out; 0 without rows."""
        return max((most for source, most in self._largest.get(device, {}).items() if source != besides), default=0)

    def is_fitted(self, device: str, besides: str = "") -> bool:
        return device in self.fitted and self.largest(device, besides) > 0

    def is_framework_known(self, stack: str, besides: str = "") -> bool:
        """Whether another source ran it. What stands in for software that nobody named is never known."""
        return stack not in STAND_INS and bool(self._stacks.get(stack, set()) - {besides})

    def is_larger(self, standing: Standing, besides: str = "") -> bool:
        """Whether the job is beyond every row of its device."""
        return 0 < self.largest(standing.device, besides) < standing.devices

    @cached_property
    def _seen_by_others(self) -> list[tuple[RunError, bool, bool]]:
        """Every row, and whether for the other sources its device is fitted and its framework known."""
        seen: dict[tuple[str, str, str], tuple[bool, bool]] = {}
        for error in self.errors:
            key = device, stack, source = error.standing.device, error.standing.stack, error.source
            if key not in seen:
                seen[key] = self.is_fitted(device, source), self.is_framework_known(stack, source)
        return [(error, *seen[error.standing.device, error.standing.stack, error.source]) for error in self.errors]

    # -- bands ---------------------------------------------------------------------------------------------

    def band(self, standing: Standing, share: float) -> Band:
        """Of rows that stand to the other sources as the job does to all; and never narrower than that of rows that are
        closer, nor, where the job is larger than any row of its device, than that of such rows."""
        fitted, known = self.is_fitted(standing.device), self.is_framework_known(standing.stack)
        band = self._closest(standing.kind, fitted, known, share)
        for closer in {(True, known), (True, True)} - {(fitted, known)}:
            band = band.at_least(self._closest(standing.kind, *closer, share))
        if not self.is_larger(standing):
            return band
        larger = [error for error in self.errors if self.is_larger(error.standing, error.source)]
        if not _is_enough(larger):
            return band
        return band.and_also(_band(larger, share, f"beyond {self.largest(standing.device):,} devices"))

    def _closest(self, kind: str, fitted: bool, known: bool, share: float) -> Band:
        """Of the closest class that is large enough: of rows so far away, and wider ones up to all."""
        classes = self._classes(kind, fitted, known)
        return next(_band(rows, share, of) for rows, of in classes if of == "all" or _is_enough(rows))

    def _classes(self, kind: str, fitted: bool, known: bool) -> Iterator[tuple[Sequence[RunError], str]]:
        """Rows whose device is fitted and framework known for other sources, or not; from the closest to all.

        Not by device: it has few sources, so that its rows say less of strangers than those of all devices.
        """
        words, framework = (
            "fitted devices" if fitted else "devices without a fit",
            "" if known else ", framework not seen",
        )
        either = [(error, was_known) for error, was_fitted, was_known in self._seen_by_others if was_fitted == fitted]
        own = [(error, was_known) for error, was_known in either if error.standing.kind == kind]
        yield [error for error, was_known in own if was_known == known], f"{words}, {KINDS[kind]}{framework}"
        yield [error for error, _ in own], f"{words}, {KINDS[kind]}"
        yield [error for error, _ in either], words
        yield self.errors, "all"


def _is_enough(rows: Sequence[RunError]) -> bool:
    """Whether a class speaks for itself; fewer rows or sources do not, and a wider class is asked."""
    return len(rows) >= ENOUGH_ROWS and len({row.source for row in rows}) >= ENOUGH_SOURCES


def _band(rows: Sequence[RunError], share: float, of: str) -> Band:
    """With as many rows below it as above: errors are not symmetric, most predictions are too fast."""
    own, each = weighed(rows), (1 + share) / 2
    low = -quantile([(-row.error, weight) for row, weight in own], each)
    high = quantile([(row.error, weight) for row, weight in own], each)
    return Band(min(0.0, low), max(0.0, high), len(rows), len({row.source for row in rows}), of)


def weighed(rows: Sequence[RunError], most: float = MOST_OF_A_SOURCE) -> list[tuple[RunError, float]]:
    """The rows with their weights: a source of many counts as ``most``."""
    count: dict[str, int] = {}
    for row in rows:
        count[row.source] = count.get(row.source, 0) + 1
    return [(row, min(1.0, most / count[row.source])) for row in rows]


def quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The smallest value that, of these and one more of weight 1 to come, a ``share`` by weight does not exceed.

    With equal weights the ⌈share·(n + 1)⌉-th smallest. The largest, where so few cannot say.
    """
    ordered = sorted(values)
    wanted, reached = share * (math.fsum(weight for _, weight in ordered) + 1), 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-9:
            return value
    return ordered[-1][0]


# -- the error bar of a job ---------------------------------------------------------------------------------

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
    bar, advice = _bar(standing_of(job)), " and ".join(_narrower(job))
    return replace(bar, basis=f"{bar.basis}; narrower if you {advice}") if advice else bar


def _narrower(job: Job) -> Iterator[str]:
    """What a user could say or measure, so that the step time is known better."""
    if job.stack.base in STAND_INS:
        yield "name the software (--stack)"
    device, outer = job.cluster.device, job.cluster.levels[-1]
    if device.efficiency.own is None and not known_errors().is_fitted(device.name):
        yield "measure the device (`shardwise calibrate`)"
    elif outer.width > 1 and outer.link is not None and outer.bandwidth is None and outer.link.assumed:
        yield f"measure the network, {outer.link.name} by assumption (`shardwise calibrate`)"


@cache
def _bar(standing: Standing) -> ErrorBar:
    time, memory = known_errors().band(standing, COVERAGE), memory_band(standing)
    sources = "1 source" if time.sources == 1 else f"{time.sources} sources"
    basis = f"step time: {_runs(time)} from {sources} not used in the fit; memory: {_runs(memory)}"
    return ErrorBar(*_truth(time), *_truth(memory), basis, time.of, memory.of)


def memory_quantile(job: Job, risk: float) -> float:
    """The factor on a predicted memory that the true one exceeds with probability ``risk`` at most."""
    return _memory_quantile(standing_of(job), risk)


@cache
def _memory_quantile(standing: Standing, risk: float) -> float:
    return math.exp(_of_memory(standing, 1 - risk, lambda error: -error, memory_errors())[0])


def memory_band(standing: Standing, errors: Sequence[RunError] | None = None) -> Band:
    """The error bar of memory, by rows of the same framework: bytes depend on the software, not on the device."""
    width, rows, of = _of_memory(standing, COVERAGE, abs, memory_errors() if errors is None else errors)
    return Band(-width, width, len(rows), len({row.source for row in rows}), of)


def _of_memory(
    standing: Standing, share: float, size: Callable[[float], float], errors: Sequence[RunError]
) -> tuple[float, Sequence[RunError], str]:
    """The size that a ``share`` of the errors does not exceed, the rows that say so, and words for these rows.

    They are the rows of the job's framework and kind of model; if too few for that quantile, those of its framework.
    If these are too few as well, or of software that plain PyTorch stands in for, they are the rows of all frameworks,
    and the size is no less than the largest of its own.
    """
    known = [row for row in errors if row.standing.stack == standing.stack]
    kind = [row for row in known if row.standing.kind == standing.kind]
    own = ((kind, KINDS[standing.kind]), (known, "all models"))
    for rows, of in () if standing.stack in STAND_INS else own:
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
    """A model that was counted of its code is known no better than on an unseen device in unseen software; nor is one
    with delta nets, of which no run was measured."""
    if job.model.counted or job.model.delta:
        return Standing("", kind_of(job.model), STAND_INS[0], job.cluster.devices)
    stack = presets.lineage("stack", job.stack.version)
    return Standing(job.cluster.device.name, kind_of(job.model), stack, job.cluster.devices)


def _truth(band: Band) -> tuple[float, float]:
    """low ≤ log(predicted / true) ≤ high, solved for true / predicted − 1."""
    return math.expm1(-band.high), math.expm1(-band.low)


def _runs(band: Band) -> str:
    return f"{band.of}: {COVERAGE:.0%} of {band.rows} runs"


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
