"""Meshes and tori: gather along one axis after the other.

``dimension_ordered`` moves the whole buffer along one axis at a time. ``bucket`` cuts it into as many parts
as there are axes and starts part p on axis p, so that all axes are busy at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.collectives.algorithms.base import Algorithm, gathering
from shardwise.collectives.algorithms.ring import two_way_rounds, two_way_sent, two_way_transfers
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer, from_all_gather, schedule_of
from shardwise.collectives.shapes import Axis, Grid
from shardwise.collectives.topology import Level
from shardwise.collectives.work import Work

if TYPE_CHECKING:
    from shardwise.collectives.arrays import Size


@dataclass(frozen=True)
class _Leg:
    """One part's all-gather along one axis; ``blocks`` (of one rank's share of a part) move together."""

    part: int
    axis_index: int
    axis: Axis
    blocks: int
    before: tuple[int, ...]  # axes along which the part has been gathered already


def _phases(axes: tuple[Axis, ...], parts: int) -> list[list[_Leg]]:
    """Phases, each a leg per part; part p takes the axes in the order p, p+1, ... (last axis first for one part)."""
    count = len(axes)
    orders = [
        [(part + j) % count for j in range(count)] if parts > 1 else list(reversed(range(count)))
        for part in range(parts)
    ]
    phases: list[list[_Leg]] = []
    for j in range(count):
        legs = []
        for part, order in enumerate(orders):
            before = tuple(order[:j])
            blocks = math.prod(axes[i].size for i in before)
            legs.append(_Leg(part, order[j], axes[order[j]], blocks, before))
        phases.append(legs)
    return phases


def _phase_cost(legs: Iterable[_Leg]) -> tuple[int, int, float]:
    """Rounds, hops and blocks on the busiest link of one phase: every round waits for its slowest leg."""
    runs = []  # (first round after it, hops, blocks per link) of every leg's full and half rounds
    for leg in legs:
        rounds, halved = two_way_rounds(leg.axis)
        load = leg.blocks * leg.axis.load
        runs.append((rounds - halved, leg.axis.stride, float(load)))
        runs.append((rounds, leg.axis.stride, load / 2 if halved else float(load)))
    hops, blocks, done = 0, 0.0, 0
    for until in sorted({end for end, _, _ in runs}):
        running = [(stride, load) for end, stride, load in runs if end >= until]
        hops += (until - done) * max(stride for stride, _ in running)
        blocks += (until - done) * max(load for _, load in running)
        done = until
    return done, hops, blocks


def _work(kind: CollectiveKind, level: Level, size: Size, parts: int) -> Work:
    """Equal axes: sum(d-1)a + (n-1)/n mb/D on a mesh, sum floor(d/2)a + (n-1)/n mb/(2D) on a torus.

    Chan et al. 2007; jax scaling-book. Other axes: the finite sum over the rounds.
    """
    axes = _axes(level)
    rounds, hops, blocks, sent = 0, 0, 0.0, 0
    for legs in _phases(axes, parts):
        phase_rounds, phase_hops, phase_blocks = _phase_cost(legs)
        rounds, hops, blocks = rounds + phase_rounds, hops + phase_hops, blocks + phase_blocks
        sent += sum(leg.blocks * two_way_sent(leg.axis) for leg in legs)
    n = level.size
    block = size / (n * parts)
    received = (n - 1) / n * size
    return gathering(kind, Work(hops, blocks * block, rounds, sent * block, received, n * received))


def _build(kind: CollectiveKind, level: Level, parts: int, name: str) -> Schedule:
    axes = _axes(level)
    split = parts * 2  # chunk = (rank * parts + part) * 2 + half
    rounds: list[list[Transfer]] = []
    for legs in _phases(axes, parts):
        for k in range(max(two_way_rounds(leg.axis)[0] for leg in legs)):
            running = (leg for leg in legs if k < two_way_rounds(leg.axis)[0])
            rounds.append([transfer for leg in running for transfer in _leg_round(axes, leg, k, split)])
    gathered = schedule_of(CollectiveKind.ALL_GATHER, level.size, level.size * split, rounds, name)
    return from_all_gather(kind, gathered)


def _leg_round(axes: tuple[Axis, ...], leg: _Leg, k: int, split: int) -> Iterable[Transfer]:
    units = [math.prod(axis.size for axis in axes[:i]) for i in range(len(axes))]
    unit = units[leg.axis_index]
    moves = two_way_transfers(leg.axis, k)
    for base in _ranks(axes, units, [i for i in range(len(axes)) if i != leg.axis_index]):
        fixed = base - sum(base // units[i] % axes[i].size * units[i] for i in leg.before)
        gathered = [fixed + rank for rank in _ranks(axes, units, list(leg.before))]
        for src, dst, block, half in moves:
            halves = (0, 1) if half is None else (half,)
            ids = tuple((rank + block * unit) * split + leg.part * 2 + part for rank in gathered for part in halves)
            yield Transfer(base + src * unit, base + dst * unit, ids)


def _ranks(axes: tuple[Axis, ...], units: list[int], over: list[int]) -> list[int]:
    """The ranks that vary along the axes ``over`` and are 0 along the others."""
    ranks = [0]
    for i in over:
        ranks = [rank + coordinate * units[i] for coordinate in range(axes[i].size) for rank in ranks]
    return ranks


def _axes(level: Level) -> tuple[Axis, ...]:
    assert isinstance(level.shape, Grid)
    return level.shape.live


def bucket_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    return _work(kind, level, size, len(_axes(level)))


def bucket_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    return _build(kind, level, len(_axes(level)), "bucket")


def ordered_work(kind: CollectiveKind, level: Level, size: Size) -> Work:
    return _work(kind, level, size, 1)


def ordered_build(kind: CollectiveKind, level: Level, chunks: int) -> Schedule:
    return _build(kind, level, 1, "dimension_ordered")


BUCKET = Algorithm("bucket", bucket_work, bucket_build)
DIMENSION_ORDERED = Algorithm("dimension_ordered", ordered_work, ordered_build)
