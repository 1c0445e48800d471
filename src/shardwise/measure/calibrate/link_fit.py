"""From measured collectives to the constants of a network's levels.

A level's features of a collective are what the price of its schedule counts: steps one after the other, and bytes over
the busiest link while all groups work at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.collectives import CollectiveKind, Level, Topology, build_schedule, price_schedule
from shardwise.collectives.shapes import Switch
from shardwise.measure.calibrate.device_fit import Residual
from shardwise.measure.calibrate.least_squares import fit
from shardwise.measure.calibrate.link_samples import LinkSample
from shardwise.spec.network import NetworkLevel, Transport

_FAST = 1e15  # bytes/s of the levels that are not looked at


@dataclass(frozen=True)
class Wire:
    """What a link is by itself: bytes/s of one port, and seconds one way."""

    rate: float
    delay: float


def fitted_level(
    base: NetworkLevel, index: int, widths: Sequence[int], samples: Sequence[LinkSample], wire: Wire | None
) -> tuple[NetworkLevel, list[Residual]]:
    """``base`` with what was measured of the backend and of our executor; ``wire`` where its speed is known.

    Of a wire that is not known the bandwidth is the faster of the two, and its latency is all in the steps' overhead.
    """
    found, residuals = {}, []
    for runner in ("backend", "schedules"):
        own = [one for one in samples if one.level == index and one.runner == runner]
        if own:
            found[runner], residual = _transport(base, index, widths, own, wire)
            what = "the backend's" if runner == "backend" else "our"
            residuals.append(replace(residual, what=f"{what} collectives, {base.name}"))
    rate = wire.rate if wire else max(one.rate for one in found.values())
    level = replace(base, link=None, bandwidth=rate, latency=wire.delay if wire else 0.0)
    backend, ours = found["backend"].within(rate), found.get("schedules")
    level = replace(
        level, trips=backend.trips, overhead=backend.overhead, startup=backend.startup, ramp=backend.ramp,
        efficiency=backend.efficiency, schedules=None if ours is None else ours.within(rate),
    )  # fmt: skip
    return level, residuals


@dataclass(frozen=True)
class _Found:
    trips: float
    overhead: float
    startup: float
    rate: float  # bytes/s that large messages reach
    ramp: float

    def within(self, rate: float) -> Transport:
        return Transport(
            trips=self.trips, overhead=self.overhead, startup=self.startup, efficiency=min(1.0, self.rate / rate),
            ramp=self.ramp,
        )  # fmt: skip


def _transport(
    base: NetworkLevel, index: int, widths: Sequence[int], samples: Sequence[LinkSample], wire: Wire | None
) -> tuple[_Found, Residual]:
    """Seconds = steps·(trips·delay + overhead) + startup + (bytes + sqrt(ramp·bytes)) / rate."""
    several_delays = wire is not None and len({one.delay for one in samples}) > 1
    features, known = [], []
    for one in samples:
        hops, carried = demands(base, index, widths, one)
        trips = hops * one.delay if several_delays else 0.0
        features.append((trips, hops, 1.0, carried, math.sqrt(carried)))
        known.append(0.0 if several_delays or wire is None else hops * one.delay)
    seconds = [one.seconds for one in samples]
    result = fit(features, seconds, known)
    if not result.values[3]:  # too noisy to tell a ramp from a rate
        result = fit([row[:4] for row in features], seconds, known)
    trips, overhead, startup, per_byte, *per_root = result.values
    if not several_delays:
        trips = 1.0 if wire is not None else 0.0
    per_byte = per_byte or min(one / row[3] for one, row in zip(seconds, features))
    ramp = (per_root[0] / per_byte) ** 2 if per_root else 0.0
    return _Found(trips, overhead, startup, 1 / per_byte, ramp), Residual.of("", result)


def demands(base: NetworkLevel, index: int, widths: Sequence[int], sample: LinkSample) -> tuple[float, float]:
    """Steps one after the other and bytes over the busiest link, of all groups that ran at once."""
    levels = tuple(
        Level(Switch(width), 1.0 if place == index else _FAST, 1.0 if place == index else 0.0,
              ports=base.ports if place == index else None)
        for place, width in enumerate(widths)
    )  # fmt: skip
    kind = CollectiveKind(sample.kind)
    schedule = build_schedule(kind, Topology.switch(len(sample.groups[0]), 1.0), sample.algorithm)
    cost = price_schedule(schedule, Topology(levels), sample.size_bytes, sample.groups).levels[index]
    return float(cost.hops), float(cost.bytes)
