"""The published runs that are nearest to a job, and what was reported of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from shardwise.cost.accuracy.residuals import kind_of, left_out_errors
from shardwise.cost.accuracy.runs import PublishedRun, run_from_row, run_rows
from shardwise.cost.accuracy.table import TRAINING_RUNS, table_path
from shardwise.cost.compute.flops import flops_per_token
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import active_parameter_count

# Distances are counted in doublings; what has no size (another device, kind of model or number format) counts as two.
OF_A_KIND = 2.0


@dataclass(frozen=True)
class NearRun:
    """A published run with a step time, how far it is from the job, and what its time says.

    ``mfu`` counts causal attention once, as ours does, whatever the source counts. ``error`` is that of our prediction
    of this run with its source left out of the fit; None where no fit knows it.
    """

    run: PublishedRun
    distance: float
    seconds: float

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
    """The nearest first; of runs that differ in neither model, machine nor layout only the newest."""
    sizes = _sizes(job)
    found: dict[tuple[object, ...], NearRun] = {}
    for run, own in _timed_runs():
        assert run.reported_seconds is not None
        apart = sum(abs(math.log2(mine / other)) for mine, other in zip(sizes, own))
        one = NearRun(run, apart + OF_A_KIND * _unlike(job, run.job), run.reported_seconds)
        found[run.source.name, run.model_name, run.device, own] = one
    return sorted(found.values(), key=lambda one: one.distance)[:most]


def _sizes(job: Job) -> tuple[float, ...]:
    """What is compared in doublings: parameters that a token passes through, devices, sequence, degrees."""
    strategy = job.strategy
    degrees = (strategy.tp, strategy.cp, strategy.pp, strategy.ep)
    return active_parameter_count(job.model), job.cluster.devices, job.training.seq, *degrees


def _unlike(one: Job, other: Job) -> int:
    """How many of device, kind of model and format of the matmuls differ."""
    return (
        (one.cluster.device.name != other.cluster.device.name)
        + (kind_of(one.model) != kind_of(other.model))
        + (one.training.recipe.compute != other.training.recipe.compute)
    )


@cache
def _timed_runs() -> tuple[tuple[PublishedRun, tuple[float, ...]], ...]:
    """Every run of the tables that reports a time and is not set aside, with its sizes."""
    return tuple((run, _sizes(run.job)) for run in _readable_runs() if run.reported_seconds and not run.set_aside)


def _readable_runs() -> Iterator[PublishedRun]:
    for table in TRAINING_RUNS:
        for row in run_rows(table_path(table)):
            with suppress(SpecError):  # `validate` says why a row cannot be read
                yield run_from_row(row)
