"""Fits the network constants of the measured machines on the published all-reduces, and prints them.

Per machine: what a call costs (startup), the share of the bandwidth that large messages reach, and the bytes of the
ramp, for the level's own rings and for the switch's reduction. Latencies per hop stay NCCL's. Every constant is held
near its prior; nothing is fitted per row. H100 and H200 are one machine: the same NVLink.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardwise.accuracy.collectives import ScoredRow, score_all_reduces
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster

TABLE = Path(__file__).parent.parent / "validation" / "collectives.csv"
PRIOR_WIDTH = 0.5
ROW_WIDTH = 0.05
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

# level index, whose constant ("own" or the switch's), field, prior
Constant = tuple[int, str, str, float]


def _scale_up(ring_ramp: float) -> tuple[Constant, ...]:
    """Of the rings only large messages were measured: their ramp's prior is what tensor-parallel steps show."""
    return (
        (0, "own", "startup", 15e-6),
        (0, "own", "efficiency", 0.80),
        (0, "own", "ramp", ring_ramp),
        (0, "switch", "startup", 20e-6),
        (0, "switch", "efficiency", 0.65),
        (0, "switch", "ramp", 16e6),
    )


_SCALE_OUT: tuple[Constant, ...] = (
    (1, "own", "startup", 200e-6),
    (1, "own", "efficiency", 0.80),
    (1, "own", "ramp", 4e6),
)
FITS = {("dgx-h100", "dgx-h200"): _scale_up(8e6), ("p6-b200",): (*_scale_up(50e6), *_SCALE_OUT)}


def with_constants(cluster: Cluster, constants: tuple[Constant, ...], values: Vector) -> Cluster:
    levels = list(cluster.levels)
    for (index, whose, field, _), value in zip(constants, values):
        level = levels[index]
        number = min(1.0, float(value)) if field == "efficiency" else float(value)
        if whose == "own":
            levels[index] = replace(level, **{field: number})  # type: ignore[arg-type]
        else:
            assert level.in_network is not None
            levels[index] = replace(level, in_network=replace(level.in_network, **{field: number}))  # type: ignore[arg-type]
    return replace(cluster, levels=tuple(levels))


def scored(machines: tuple[str, ...], constants: tuple[Constant, ...], steps: Vector) -> list[ScoredRow]:
    values = np.array([prior for *_, prior in constants]) * np.exp(steps)

    def described(name: str) -> Cluster:
        cluster = cluster_from(name)
        return with_constants(cluster, constants, values) if name in machines else cluster

    return [row for row in score_all_reduces(TABLE, described=described) if row.machine in machines]


def fit(machines: tuple[str, ...], constants: tuple[Constant, ...], rounds: int = 12) -> Vector:
    """Gauss-Newton on log errors, every constant drawn to its prior; squares, so that no row is left far off."""

    def errors(steps: Vector) -> Vector:
        return np.array([math.log1p(row.error) for row in scored(machines, constants, steps)])

    steps = np.zeros(len(constants))
    best, least = steps, math.inf
    for _ in range(rounds):
        now = errors(steps)
        if float(now @ now) < least:
            best, least = steps, float(now @ now)
        columns = [(errors(steps + 0.02 * unit) - now) / 0.02 for unit in np.eye(len(constants))]
        jacobian = np.vstack([np.array(columns).T / ROW_WIDTH, np.eye(len(constants)) / PRIOR_WIDTH])
        residual = np.concatenate([now / ROW_WIDTH, steps / PRIOR_WIDTH])
        steps = steps + np.clip(np.linalg.lstsq(jacobian, -residual, rcond=None)[0], -0.3, 0.3)
    return best


def main() -> int:
    for machines, constants in FITS.items():
        steps = fit(machines, constants)
        rows = scored(machines, constants, steps)
        absolute = [abs(row.error) for row in rows]
        print(f"{', '.join(machines)}: {len(rows)} rows, mean {np.mean(absolute):.1%}, worst {max(absolute):.1%}")
        for (index, whose, field, prior), step in zip(constants, steps):
            print(f"  level {index}, {whose:<6} {field:<10} {prior * math.exp(step):.4g}  (prior {prior:.4g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
