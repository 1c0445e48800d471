"""How the signed error of step times changes with every doubling of the devices, by what data parallelism shards over.

python bench/scale.py            # all published runs as scored: each kind of sharding, and all
python bench/scale.py --series   # one line for every series of runs

A series is what one source measured on at least four times as many devices, with all else the same: device, model,
sequence, microbatch, their number, precision, and the degrees inside a replica. Its slope is that of least squares
through the errors over log2 of the devices. The slopes of a source are weighted by the squares of the doublings they
span, and sources count equally.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.accuracy.runs import PublishedRun
from shardwise.accuracy.scores import published_runs
from shardwise.accuracy.table import TRAINING_RUNS, release
from shardwise.cost.step.prediction import predict

_DOUBLINGS = 2  # that a series spans at least
Shards = Literal["ZeRO over all ranks", "ZeRO over a group", "no ZeRO"]


@dataclass(frozen=True)
class Series:
    """Runs of one kind; ``points`` are log2 of the devices and the signed error."""

    source: str
    name: str
    shards: Shards
    points: tuple[tuple[float, float], ...]

    @property
    def mean(self) -> float:
        return statistics.mean(x for x, _ in self.points)

    @property
    def weight(self) -> float:
        return sum((x - self.mean) ** 2 for x, _ in self.points)

    @property
    def slope(self) -> float:
        """By how much the error changes with a doubling."""
        middle = statistics.mean(y for _, y in self.points)
        return sum((x - self.mean) * (y - middle) for x, y in self.points) / self.weight


def shards_of(run: PublishedRun) -> Shards:
    strategy = run.job.strategy
    if not strategy.zero or strategy.data_parallel == 1:
        return "no ZeRO"
    return "ZeRO over a group" if strategy.shard_group else "ZeRO over all ranks"


def series_of(runs: Iterable[PublishedRun], errors: dict[str, float]) -> list[Series]:
    """The series among ``runs``, whose ``errors`` are by row."""
    found: dict[tuple[Hashable, ...], list[PublishedRun]] = {}
    for run in runs:
        job, own = run.job, run.job.strategy
        degrees = (own.tp, own.cp, own.pp, own.interleave, own.ep, own.zero, shards_of(run))
        training = (job.training.seq, job.training.precision, own.microbatch, job.microbatches, own.recompute)
        what = (job.model, job.cluster.device.name, *training)
        found.setdefault((run.source.name, release(run.row), *what, *degrees), []).append(run)
    series = []
    for own_runs in found.values():
        points = tuple((math.log2(run.job.cluster.devices), errors[run.row_id]) for run in own_runs)
        if max(x for x, _ in points) - min(x for x, _ in points) >= _DOUBLINGS:
            first = own_runs[0]
            series.append(Series(first.source.name, first.row_id, shards_of(first), points))
    return series


def over_sources(series: Sequence[Series]) -> tuple[float, int]:
    """The mean slope, each source counted once; and how many sources there are."""
    each = []
    for source in dict.fromkeys(one.source for one in series):
        own = [one for one in series if one.source == source]
        each.append(sum(one.slope * one.weight for one in own) / sum(one.weight for one in own))
    return statistics.mean(each), len(each)


def main() -> int:
    runs = [run for run in published_runs(TRAINING_RUNS)[0] if run.reported_seconds and not run.set_aside]
    errors = {run.row_id: predict(run.job).step_seconds / (run.reported_seconds or math.nan) - 1 for run in runs}
    series = series_of(runs, errors)
    if "--series" in sys.argv[1:]:
        for one in series:
            largest = 2 ** max(x for x, _ in one.points)
            print(f"{one.shards:20} {one.name:48} to {largest:7,.0f} devices  {one.slope:+.2%} per doubling")
    for kind in ("ZeRO over all ranks", "ZeRO over a group", "no ZeRO", None):
        own = [one for one in series if kind in (one.shards, None)]
        slope, sources = over_sources(own)
        rows = sum(len(one.points) for one in own)
        name = kind or "all"
        print(
            f"{name:20} {rows:4} rows {len(own):3} series {sources:3} sources  {slope:+.2%} per doubling of the devices"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
