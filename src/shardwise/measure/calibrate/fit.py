"""Fits the constants that `plan` prices with to measured figures, each term where it dominates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives import CollectiveKind, Level, Topology, build_schedule, price_schedule
from shardwise.collectives.shapes import Switch
from shardwise.cost.step.stage_time import optimizer_seconds, stage_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.calibrate.device_samples import (
    AttentionSample,
    DeviceSamples,
    MatmulSample,
    StepSample,
    step_job,
)
from shardwise.measure.calibrate.link_samples import LinkSample
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.hardware import Device
from shardwise.spec.network import NetworkLevel, Transport

# -- non-negative coefficients that explain measured seconds -----------------------------------------

Numbers = NDArray[np.float64]
NEGLIGIBLE = 1e-9
_DRAWN = 0.03  # weight of the expected values: being off by 100% costs as much as one residual of 3%


@dataclass(frozen=True)
class Fit:
    """``values`` of the coefficients, and the relative error of each measurement (model / measured - 1)."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]


def fit(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    known: Sequence[float] | None = None,
    expected: Sequence[float] | None = None,
) -> Fit:
    """Minimises the relative errors of ``known + features · values``; every value is zero or more.

    Values are weakly drawn to their ``expected`` ones, where they stay if no measurement depends on them.
    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
    """
    measured = np.asarray(seconds, dtype=float)
    base = np.zeros_like(measured) if known is None else np.asarray(known, dtype=float)
    rows = np.asarray(features, dtype=float) / measured[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    target = (measured - base) / measured
    matrix = rows / scales
    if expected is not None:
        drawn = _DRAWN / (np.asarray(expected, dtype=float) * scales)
        matrix, target = np.vstack([matrix, np.diag(drawn)]), np.append(target, np.full(len(drawn), _DRAWN))
    parts = _nonnegative(matrix, target)  # each as a share of the measurement that depends on it most
    values = np.where(parts < NEGLIGIBLE, 0.0, parts) / scales
    model = base + np.asarray(features, dtype=float) @ values
    return Fit(tuple(values.tolist()), tuple((model / measured - 1).tolist()))


def _nonnegative(matrix: Numbers, target: Numbers) -> Numbers:
    count = matrix.shape[1]
    values, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gain = matrix.T @ (target - matrix @ values)
        gain[free] = -np.inf
        if free.all() or gain.max() <= 1e-12:
            break
        free[int(gain.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if not free.any() or trial[free].min() > 0:
                break
            shrinking = free & (trial <= 0)
            step = (values[shrinking] / np.maximum(values[shrinking] - trial[shrinking], 1e-300)).min()
            values = values + step * (trial - values)
            free &= values > 1e-15
        values = trial
    return values


# -- the device --------------------------------------------------------------------------------------
# The feature of a coefficient is the price (`cost.compute.roofline`) with only that coefficient set, so there is no
# second model of a kernel here.

NOTHING = Efficiency(operand_traffic=0.0, elementwise_traffic=0.0, operator_seconds=0.0, step_seconds=0.0)


@dataclass(frozen=True)
class Residual:
    """How well one kind of figure is explained, as relative errors."""

    what: str
    figures: int
    median_error: float
    worst_error: float

    @classmethod
    def of(cls, what: str, fitted: Fit) -> Residual:
        errors = np.abs(fitted.residuals or (0.0,))
        return cls(what, len(fitted.residuals), float(np.median(errors)), float(np.max(errors)))


def fitted_cpu(base: Device, samples: Sequence[DeviceSamples]) -> tuple[Device, list[Residual]]:
    """``base`` with the median of what was measured; its peak is the rate that large matmuls approach."""
    device_figures = _middle(samples)
    copied = max(2 * copy.bytes / copy.seconds for copy in device_figures.copies)
    device = replace(base, memory_bandwidth=copied, memory=float(device_figures.memory_bytes), driver_memory=0.0)
    # What one machine cannot show: how much devices differ, and what mixtures of experts wait for.
    unseen = {name: getattr(base.efficiency, name) for name in ("routing_seconds", "device_spread", "layer_jitter")}
    device = replace(device, efficiency=replace(NOTHING, memory=1.0, **unseen))
    device, fitted = _with_matmuls(device, device_figures.matmuls)
    residuals = [Residual.of("matmuls in fp32", fitted)]
    device = _with_formats(device, device_figures.formats)
    device, forward, backward = _with_attention(device, device_figures.attentions)
    residuals += [Residual.of("attention, forward", forward), Residual.of("attention, backward", backward)]
    device, fitted = _with_steps(device, device_figures.steps)
    residuals.append(Residual.of("passes of small models", fitted))
    return _with_updates(device, device_figures.steps), residuals


def _middle(samples: Sequence[DeviceSamples]) -> DeviceSamples:
    """The median over devices of every figure."""
    if len(samples) == 1:
        return samples[0]

    def middle(name: str, seconds: Sequence[str]) -> tuple[object, ...]:
        columns = zip(*(getattr(device, name) for device in samples))
        return tuple(
            replace(
                same[0], **{field: statistics.median(getattr(figure, field) for figure in same) for field in seconds}
            )
            for same in columns
        )

    kinds = {
        "matmuls": ("seconds",),
        "formats": ("seconds",),
        "attentions": ("forward_seconds", "backward_seconds"),
        "copies": ("seconds",),
        "steps": ("passes_seconds", "update_seconds"),
    }
    return replace(samples[0], **{name: middle(name, seconds) for name, seconds in kinds.items()})  # type: ignore[arg-type]


def _with_matmuls(device: Device, matmuls: Sequence[MatmulSample]) -> tuple[Device, Fit]:
    """Fits the asymptotic rate, the loss from short inner dimensions, operand traffic, and the cost of a call."""
    features = []
    for matmul in matmuls:
        flops = 2.0 * matmul.rows * matmul.inner * matmul.columns
        moved = 4 * (matmul.rows * matmul.inner + matmul.inner * matmul.columns + matmul.rows * matmul.columns)
        features.append((flops, flops / matmul.inner, moved, 1.0))
    fitted = fit(features, [matmul.seconds for matmul in matmuls])
    per_flop, rolloff, per_byte, _ = fitted.values
    # Formats that are converted to fp32 and back are no faster than that; `_with_formats` refines them.
    formats = ("fp32", "bf16", "fp16")
    peaks = {name: 1 / per_flop if name in formats else peak for name, peak in device.peak.items()}
    shares = {**device.efficiency.gemm, **dict.fromkeys(formats, 1.0)}
    efficiency = replace(
        device.efficiency,
        gemm=FrozenMapping(shares),
        gemm_rolloff=rolloff / per_flop,
        operand_traffic=per_byte * device.memory_bandwidth,
    )
    return replace(device, peak=FrozenMapping(peaks), efficiency=efficiency), fitted


def _with_formats(device: Device, formats: Sequence[MatmulSample]) -> Device:
    """Peaks of other formats relative to fp32, by one matmul: a format without instructions is far slower."""
    seconds = {matmul.data_type: matmul.seconds for matmul in formats}
    others = {name: device.peak["fp32"] * seconds["fp32"] / spent for name, spent in seconds.items() if name != "fp32"}
    return replace(device, peak=FrozenMapping({**device.peak, **others}))


def _with_attention(device: Device, attentions: Sequence[AttentionSample]) -> tuple[Device, Fit, Fit]:
    counted = []
    for attention in attentions:
        attended = (attention.seq + 1) / 2 / attention.seq
        scores = attention.batch * attention.seq * attention.seq * attention.heads * attended
        counted.append((scores * 4 * attention.features, scores))
    forward = fit(
        [(flops, scores, 1.0) for flops, scores in counted], [attention.forward_seconds for attention in attentions]
    )
    per_flop, per_score, _ = forward.values
    score_flops = per_score / per_flop if per_flop else 0.0
    backward = fit(
        [(2.5 * (flops + score_flops * scores), 1.0) for flops, scores in counted],
        [attention.backward_seconds for attention in attentions],
    )
    peak = device.peak_flops(attentions[0].data_type)

    def share(seconds_per_flop: float) -> float:
        return min(1.0, 1 / (seconds_per_flop * peak)) if seconds_per_flop else 1.0

    efficiency = replace(
        device.efficiency,
        attention_forward=share(per_flop),
        attention_backward=share(backward.values[0]),
        score_flops=score_flops,
    )
    return replace(device, efficiency=efficiency), forward, backward


def _with_steps(device: Device, steps: Sequence[StepSample]) -> tuple[Device, Fit]:
    """Fits the traffic of elementwise kernels relative to its minimum, and the cost of starting one."""

    def priced(step: StepSample, **changes: float) -> float:
        efficiency = replace(device.efficiency, **changes)  # type: ignore[arg-type]
        job = step_job(step.shape, step.precision, replace(device, efficiency=efficiency))
        seconds = stage_seconds(job, rank_contents(job, 0))
        return float(seconds.forward + seconds.backward)

    known = [priced(step) for step in steps]
    names = ("elementwise_traffic", "operator_seconds")
    features = [[priced(step, **{name: 1.0}) - base for name in names] for step, base in zip(steps, known)]
    fitted = fit(features, [step.passes_seconds for step in steps], known)
    efficiency = replace(device.efficiency, **dict(zip(names, fitted.values)))  # type: ignore[arg-type]
    return replace(device, efficiency=efficiency), fitted


def _with_updates(device: Device, steps: Sequence[StepSample]) -> Device:
    """Fits the cost of an update beyond its memory traffic."""
    beside = []
    for step in steps:
        job = step_job(step.shape, step.precision, device)
        priced = float(optimizer_seconds(job, rank_contents(job, 0), sharding_of(job.strategy)))
        beside.append(step.update_seconds - priced)
    return replace(device, efficiency=replace(device.efficiency, step_seconds=max(0.0, statistics.median(beside))))


# -- the levels of the network -----------------------------------------------------------------------
# The features of a collective on a level are those that price its schedule: successive steps, and bytes over the
# busiest link while all groups work at the same time.

_FAST = 1e15  # bytes/s of the other levels


@dataclass(frozen=True)
class Wire:
    """A link without software: bytes/s of one port, and seconds one way."""

    rate: float
    delay: float


def fitted_level(
    base: NetworkLevel, index: int, widths: Sequence[int], samples: Sequence[LinkSample], wire: Wire | None
) -> tuple[NetworkLevel, list[Residual]]:
    """``base`` with what was measured of the backend's collectives and of our own; ``wire`` if its speed is known.

    Otherwise the faster of the two gives the bandwidth, and the latency is part of the overhead of a step.
    """
    transports, rates, residuals = {}, {}, []
    for runner, whose in {"backend": "the backend's", "schedules": "our"}.items():
        own = [sample for sample in samples if sample.level == index and sample.runner == runner]
        if own:
            transports[runner], rates[runner], result = _transport(base, index, widths, own, wire)
            residuals.append(Residual.of(f"{whose} collectives, {base.name}", result))
    bandwidth = wire.rate if wire else max(rates.values())
    transports = {
        runner: replace(transport, efficiency=min(1.0, rates[runner] / bandwidth))
        for runner, transport in transports.items()
    }
    backend = transports["backend"]
    level = replace(
        base, link=None, bandwidth=bandwidth, latency=wire.delay if wire else 0.0, trips=backend.trips,
        overhead=backend.overhead, startup=backend.startup, ramp=backend.ramp, efficiency=backend.efficiency,
        schedules=transports.get("schedules"),
    )  # fmt: skip
    return level, residuals


def _transport(
    base: NetworkLevel, index: int, widths: Sequence[int], samples: Sequence[LinkSample], wire: Wire | None
) -> tuple[Transport, float, Fit]:
    """Fits seconds = steps·(trips·delay + overhead) + startup + (bytes + sqrt(ramp·bytes)) / rate, in bytes/s."""
    several_delays = wire is not None and len({sample.delay for sample in samples}) > 1
    features, known = [], []
    for sample in samples:
        hops, carried = demands(base, index, widths, sample)
        trips = hops * sample.delay if several_delays else 0.0
        features.append((trips, hops, 1.0, carried, math.sqrt(carried)))
        known.append(0.0 if several_delays or wire is None else hops * sample.delay)
    seconds = [sample.seconds for sample in samples]
    result = fit(features, seconds, known)
    if not result.values[3]:  # too noisy to tell a ramp from a rate
        result = fit([row[:4] for row in features], seconds, known)
    trips, overhead, startup, per_byte, *per_root = result.values
    if not several_delays:
        trips = 1.0 if wire is not None else 0.0
    per_byte = per_byte or min(spent / row[3] for spent, row in zip(seconds, features))
    ramp = (per_root[0] / per_byte) ** 2 if per_root else 0.0
    return Transport(trips=trips, overhead=overhead, startup=startup, ramp=ramp), 1 / per_byte, result


def demands(base: NetworkLevel, index: int, widths: Sequence[int], sample: LinkSample) -> tuple[float, float]:
    """Successive steps, and bytes over the busiest link, with all groups running at once."""
    levels = tuple(
        Level(Switch(width), 1.0 if place == index else _FAST, 1.0 if place == index else 0.0,
              ports=base.ports if place == index else None)
        for place, width in enumerate(widths)
    )  # fmt: skip
    kind = CollectiveKind(sample.kind)
    schedule = build_schedule(kind, Topology.switch(len(sample.groups[0]), 1.0), sample.algorithm)
    cost = price_schedule(schedule, Topology(levels), sample.size_bytes, sample.groups).levels[index]
    return float(cost.hops), float(cost.bytes)
