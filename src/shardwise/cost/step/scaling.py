"""Strong and weak scaling of a job's predicted step over data parallelism.

Strong-scaling efficiency is T1/(N·TN) at a fixed batch, weak-scaling efficiency T1/TN at a batch that grows with N
(Amdahl 1967; Gustafson 1988), with T1 the smallest size in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.memory.room import Fit
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


@dataclass(frozen=True)
class ScalingRow:
    """One size of a scaling table; efficiency is relative to the table's first row."""

    devices: int
    data_parallel: int
    sequences: int
    predicted_seconds: float
    tokens_per_second: float
    efficiency: float
    exposed_share: float
    fit: Fit


def scaling_table(job: Job, kind: str, factors: tuple[float, ...] = (1 / 4, 1 / 2, 1, 2, 4, 8)) -> list[ScalingRow]:
    """Rows of the ``"strong"`` or ``"weak"`` table; sizes that the job cannot take are left out."""
    rows: list[ScalingRow] = []
    for factor in factors:
        scaled = _scaled(job, factor, grow_batch=kind == "weak")
        if scaled is None:
            continue
        try:
            analysis = analyze(scaled)
        except SpecError:  # a group would cut across the smaller network
            continue
        rows.append(_row(analysis, rows[0] if rows else None, kind))
    return rows


def _scaled(job: Job, factor: float, *, grow_batch: bool) -> Job | None:
    dp = job.strategy.data_parallel * factor
    devices = job.cluster.devices * factor
    if dp != int(dp) or dp < 1 or devices != int(devices):
        return None
    sequences = job.sequences * factor if grow_batch else job.sequences
    if sequences != int(sequences):
        return None
    try:
        return replace(
            job,
            cluster=job.cluster.with_devices(int(devices)),
            strategy=replace(job.strategy, dp=int(dp)),
            training=replace(job.training, global_batch=int(sequences)),
        )
    except SpecError:
        return None


def _row(analysis: Analysis, first: ScalingRow | None, kind: str) -> ScalingRow:
    devices, seconds = analysis.job.cluster.devices, analysis.predicted_seconds
    efficiency = 1.0
    if first is not None:
        growth = devices / first.devices
        efficiency = first.predicted_seconds / seconds / (growth if kind == "strong" else 1)
    return ScalingRow(
        devices,
        analysis.job.strategy.data_parallel,
        analysis.job.sequences,
        seconds,
        analysis.tokens_per_second,
        efficiency,
        analysis.exposed_share,
        analysis.fit,
    )
