"""Error bars: how far the predictions of published runs are off, as `bench/residuals.py` writes it beside this file."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.spec.job import Job
from shardwise.spec.model import Model

FILE = Path(__file__).with_name("residuals.csv")
COVERAGE = 0.8  # share of the rows within a band
ONE_JOB = "one job"  # key of "ratio" lines: two strategies of the same job, on any device
_KINDS = {"dense": "dense models", "moe": "mixtures of experts"}


@dataclass(frozen=True)
class Residuals:
    """Relative errors of the rows of one device (``what`` is time) or software stack (memory), or of two rows' ratio.

    An error is predicted / reported − 1. A share of COVERAGE of them is at most ``band``, with the
    row's own model left out of the fit where ``left_out_mape`` is given.
    """

    what: str
    of: str
    kind: str
    rows: int
    models: int
    mape: float
    bias: float
    left_out_mape: float | None
    band: float


@dataclass(frozen=True)
class ErrorBar:
    """Where the truth lies beside a prediction, relative to it: −0.05 is 5% less. ``basis`` says how that is known.

    The memory is that of tensors, without the framework's allowance.
    """

    time_low: float
    time_high: float
    memory_low: float
    memory_high: float
    basis: str


def error_bar(job: Job) -> ErrorBar:
    """The bars of a predicted step time, by the job's device, and of a predicted memory, by its software stack.

    Bytes do not depend on the device, but on what a framework saves.
    """
    kind = kind_of(job.model)
    time, time_basis = _band("time", job.cluster.device.name, kind, "on")
    memory, memory_basis = _band("memory", job.stack.name, kind, "with")
    return ErrorBar(*_truth(time.band), *_truth(memory.band), f"step time: {time_basis}; memory: {memory_basis}")


@dataclass(frozen=True)
class Noise:
    """How far the predicted ratio of two strategies' times may be off, as a share. ``basis`` says how that is known."""

    share: float
    basis: str


def noise_of(job: Job) -> Noise:
    """Of strategies of one job: closer than this, the prediction cannot tell which is faster.

    Narrower than two error bars: what a device's constants miss is missed in both.
    """
    kind = kind_of(job.model)
    known = residuals().get(("ratio", ONE_JOB, kind)) or residuals()["ratio", ONE_JOB, "dense"]
    pairs = f"{known.rows} pairs of published runs of {_KINDS[known.kind]} ({known.models} models)"
    missing = "" if known.kind == kind else f"no such pairs of {_KINDS[kind]}: "
    return Noise(known.band, f"{missing}{COVERAGE:.0%} of {pairs} that differ in the strategy alone")


def kind_of(model: Model) -> str:
    return "moe" if model.moe else "dense"


def _truth(band: float) -> tuple[float, float]:
    """|predicted / true − 1| ≤ band, solved for true / predicted − 1."""
    return 1 / (1 + band) - 1, 1 / (1 - band) - 1 if band < 1 else math.inf


def _band(what: str, of: str, kind: str, place: str) -> tuple[Residuals, str]:
    """The rows of that device or stack and kind of model; where there are none, those that are off furthest."""
    known = residuals().get((what, of, kind))
    if known is not None:
        return known, f"{_runs(known)} {place} {of}"
    widest = max((one for one in residuals().values() if one.what == what), key=lambda one: one.band)
    missing = f"no published runs of {_KINDS[kind]} {place} {of}"
    return widest, f"{missing}: the widest of those known, {_runs(widest)} {place} {widest.of}"


def _runs(one: Residuals) -> str:
    models, each = ("1 model", "") if one.models == 1 else (f"{one.models} models", " each")
    fit = "" if one.left_out_mape is None else f",{each} left out of the fit"
    return f"{COVERAGE:.0%} of {one.rows} published runs of {_KINDS[one.kind]} ({models}{fit})"


@cache
def residuals() -> dict[tuple[str, str, str], Residuals]:
    """Every line of the table, by what, of and kind."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return {(row["what"], row["of"], row["kind"]): _read(**row) for row in csv.DictReader(file)}


def _read(what: str, of: str, kind: str, rows: str, models: str, **errors: str) -> Residuals:
    read: dict[str, Any] = {name: float(error) if error else None for name, error in errors.items()}
    return Residuals(what, of, kind, int(rows), int(models), **read)
