"""The published runs that are nearest to a job, and what was reported of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from shardwise.accuracy.runs import PublishedRun, run_from_row, run_rows
from shardwise.accuracy.table import TRAINING_RUNS, table_path
from shardwise.cost.compute.flops import flops_per_token
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import active_parameter_count
from shardwise.uncertainty.residuals import kind_of, left_out_errors

# Distances are counted in doublings. The layout is what a user is about to change: a degree counts half. What has no
# size counts as so many: FP8 doubles the arithmetic; another device or kind of model is further than any layout.
OF_A_DEGREE, OF_A_FORMAT, OF_A_KIND = 0.5, 1.0, 3.0
NEAR_WORDS = (
    f"doublings of active parameters, devices and sequence; a doubling of a degree counts {OF_A_DEGREE:g}, another "
    f"number format {OF_A_FORMAT:g}, another device or kind of model {OF_A_KIND:g}"
)


@dataclass(frozen=True)
class NearRun:
    """A published run with a step time, how far it is from the job, and what its time says.

    ``mfu`` counts causal attention once, as ours does, whatever the source counts. ``error`` is that of our prediction
    of this run with its source left out of the fit; None where no fit knows it. ``differs`` names what sets it apart.
    """

    run: PublishedRun
    distance: float
    seconds: float
    differs: tuple[str, ...]

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.run.job.tokens_per_step / self.seconds / self.run.job.cluster.devices

    @property
    def mfu(self) -> float:
        job = self.run.job
        flops = flops_per_token(job.model, job.training.seq, "causal") * job.tokens_per_step
        return flops / (self.seconds * job.peak_flops)

    @property
    def error(self) -> float | None:
        return left_out_errors().get(self.run.row_id)


def nearest_runs(job: Job, most: int = 5) -> list[NearRun]:
    """The nearest first; of runs that differ in neither model, machine nor layout only the last of its table."""
    sizes, degrees = _sizes(job), _degrees(job)
    nearest: dict[tuple[object, ...], NearRun] = {}
    for run, own_sizes, own_degrees in _timed_runs():
        assert run.reported_seconds is not None
        apart = _doublings(sizes, own_sizes) + OF_A_DEGREE * _doublings(degrees, own_degrees) + _unlike(job, run.job)
        near = NearRun(run, apart, run.reported_seconds, _differences(job, run.job))
        nearest[run.source.name, run.model_name, run.device, own_sizes, own_degrees] = near
    return sorted(nearest.values(), key=lambda near: near.distance)[:most]


def _doublings(sizes: tuple[float, ...], others: tuple[float, ...]) -> float:
    return sum(abs(math.log2(mine / theirs)) for mine, theirs in zip(sizes, others))


def _sizes(job: Job) -> tuple[float, ...]:
    """Parameters that a token passes through, devices, sequence."""
    return active_parameter_count(job.model), job.cluster.devices, job.training.seq


def _degrees(job: Job) -> tuple[float, ...]:
    strategy = job.strategy
    return strategy.tp, strategy.cp, strategy.pp, strategy.ep


def _differences(job: Job, other: Job) -> tuple[str, ...]:
    """How many times the sizes of the job a run has, where that is not about as many; what else it is."""
    names = ("active parameters", "devices", "tokens a sequence")
    factors = (theirs / mine for mine, theirs in zip(_sizes(job), _sizes(other)))
    sizes = [f"{factor:.2g} × the {name}" for name, factor in zip(names, factors) if not 0.8 < factor < 1.25]
    kinds = [("device", job.cluster.device.name, other.cluster.device.name)]
    kinds += [("kind of model", kind_of(job.model), kind_of(other.model))]
    kinds += [("number format", job.training.recipe.compute, other.training.recipe.compute)]
    return (*sizes, *(f"different {name}" for name, mine, theirs in kinds if mine != theirs))


def _unlike(job: Job, other: Job) -> float:
    """What another device, kind of model and format of the matmuls count."""
    kinds = (job.cluster.device.name != other.cluster.device.name) + (kind_of(job.model) != kind_of(other.model))
    return OF_A_KIND * kinds + OF_A_FORMAT * (job.training.recipe.compute != other.training.recipe.compute)


@cache
def _timed_runs() -> tuple[tuple[PublishedRun, tuple[float, ...], tuple[float, ...]], ...]:
    """Every run of the tables that reports a time and is not set aside, with its sizes and degrees."""
    timed = (run for run in _readable_runs() if run.reported_seconds and not run.set_aside)
    return tuple((run, _sizes(run.job), _degrees(run.job)) for run in timed)


def _readable_runs() -> Iterator[PublishedRun]:
    for table in TRAINING_RUNS:
        for row in run_rows(table_path(table)):
            with suppress(SpecError):  # `validate` says why a row cannot be read
                yield run_from_row(row)
