"""Which curve describes a link: a line, a line with a ramp, or pieces with a rate of their own.

    sudo PYTHONPATH=src python bench/link_shape.py [2 2x2,200Mbit,1ms 2x2,1Gbit,1ms]

Measures collectives of many sizes on processes of this machine (a number) and on virtual nodes, fits each curve on
every second size and judges it by the sizes between, which it has not seen. Once with constants that all collectives
share, as a network level has them, and once with constants for each collective. All is measured twice: how far the
second time is from the first is what no curve can get below.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.launch.emulate.network import EmulatedPool
from shardwise.launch.pool import Pool
from shardwise.measure.calibrate.fit import demands, fit
from shardwise.measure.calibrate.link_samples import LinkSample, measure_links, slowest
from shardwise.measure.calibrate.ranks import PoolRanks
from shardwise.spec.clusters import cpu_hosts
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.hardware import Cluster

WHERE = ("2", "2x2,200Mbit,1ms", "2x2,1Gbit,1ms")
SIZES = tuple(2**power for power in range(10, 23))
PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.engine.collectives")
Features = tuple[float, ...]
Curve = Callable[[float], Features]  # of so many bytes over the busiest link


@dataclass(frozen=True)
class Figure:
    """One collective of one size: what it demands of the level, and what it took."""

    kind: str
    size_bytes: int
    hops: float
    carried_bytes: float
    seconds: float
    again_seconds: float

    @property
    def is_fitted(self) -> bool:
        return SIZES.index(self.size_bytes) % 2 == 0


def main() -> None:
    for where in sys.argv[1:] or WHERE:
        cluster, first, second = measured(where)
        widths = [level.width for level in cluster.levels]
        for index, level in enumerate(cluster.levels):
            for runner in ("backend", "schedules"):
                figures = [
                    Figure(one.kind, one.size_bytes, *demands(level, index, widths, one), one.seconds, again.seconds)
                    for one, again in zip(first, second)
                    if (one.level, one.runner) == (index, runner)
                ]
                if figures:
                    judge(f"{where}, {level.name}, {runner}", figures)


def measured(where: str) -> tuple[Cluster, list[LinkSample], list[LinkSample]]:
    """Everything twice."""
    if where.isdecimal():
        cluster = cpu_hosts(1, int(where))
        with Pool(PRELOAD) as pool:
            return cluster, links(pool, cluster), links(pool, cluster)
    emulation = Emulation.parse(where)
    cluster = cluster_of(emulation, cpu_hosts(1, 1))
    with EmulatedPool(emulation, PRELOAD) as pool:
        return cluster, links(pool, cluster), links(pool, cluster)


def links(pool: Pool, cluster: Cluster) -> list[LinkSample]:
    widths = tuple(level.width for level in cluster.levels)
    of_ranks = PoolRanks(pool, cluster.devices).run(measure_links, widths, "cpu", 1, SIZES)
    return slowest(of_ranks)


def judge(what: str, figures: Sequence[Figure]) -> None:
    unseen = [one for one in figures if not one.is_fitted]
    again = [abs(one.again_seconds / one.seconds - 1) for one in unseen]
    print(f"\n{what}: errors (median, worst) on sizes that were not fitted")
    print(f"  {'measured again':<24}{statistics.median(again):>7.1%}{max(again):>7.1%}")
    print(f"  {'':<24}{'shared':>10}{'each collective':>20}")
    by_kind = [[one for one in figures if one.kind == kind] for kind in dict.fromkeys(one.kind for one in figures)]
    for name in ("a line", "a line with a ramp", "two pieces", "three pieces", "two pieces and a ramp"):
        shared, each = ([error for part in parts for error in errors(name, part)] for parts in ([figures], by_kind))
        cells = "".join(f"{statistics.median(found):>9.1%}{max(found):>7.1%}" for found in (shared, each))
        print(f"  {name:<22}{cells}", flush=True)


def errors(name: str, figures: Sequence[Figure]) -> list[float]:
    """Of the best curve of this kind for the fitted sizes, on the others."""
    known, unseen = ([one for one in figures if one.is_fitted is fitted] for fitted in (True, False))
    ends = sorted({one.carried_bytes for one in known})[1:-1]
    best = min(curves(name, ends), key=lambda curve: sum(error**2 for error in apart(curve, known, known)))
    return [abs(error) for error in apart(best, known, unseen)]


def curves(name: str, ends: Sequence[float]) -> list[Curve]:
    """Of pieces those with every choice of ends."""
    match name:
        case "a line":
            return [pieces(())]
        case "a line with a ramp":
            return [with_ramp(pieces(()))]
        case "two pieces":
            return [pieces((end,)) for end in ends]
        case "three pieces":
            return [pieces(pair) for pair in itertools.combinations(ends, 2)]
    return [with_ramp(pieces((end,))) for end in ends]


def pieces(ends: tuple[float, ...]) -> Curve:
    """Bytes within each piece: with a rate of its own for each, seconds are continuous and never fall."""
    edges = tuple(itertools.pairwise((0.0, *ends, math.inf)))
    return lambda carried: tuple(min(max(carried - low, 0.0), high - low) for low, high in edges)


def with_ramp(curve: Curve) -> Curve:
    return lambda carried: (*curve(carried), math.sqrt(carried))


def apart(curve: Curve, known: Sequence[Figure], asked: Sequence[Figure]) -> Iterator[float]:
    """Shares of the measured seconds of ``asked``, by a fit on ``known``."""

    def features(figures: Sequence[Figure]) -> list[Features]:
        return [(one.hops, 1.0, *curve(one.carried_bytes)) for one in figures]

    values = fit(features(known), [one.seconds for one in known]).values
    for one, row in zip(asked, features(asked)):
        yield sum(value * feature for value, feature in zip(values, row)) / one.seconds - 1


if __name__ == "__main__":
    main()
