"""From measured figures to the device that `plan` prices with: each term of the price is fitted where it dominates.

A coefficient's feature is the price (`cost.compute.roofline`) with that coefficient alone turned on, so that there is
no second model of a kernel here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cost.memory.states import sharding_of
from shardwise.cost.step.stage_time import optimizer_seconds, stage_seconds
from shardwise.layout.stages import RankContents, rank_contents
from shardwise.measure.calibrate.least_squares import Fit, fit
from shardwise.measure.calibrate.samples import AttentionSample, DeviceSamples, ProductSample, StepSample
from shardwise.measure.calibrate.step_job import step_job
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job

NOTHING = Efficiency(operand_traffic=0.0, elementwise_traffic=0.0, operator_seconds=0.0, step_seconds=0.0)


@dataclass(frozen=True)
class Residual:
    """How well one kind of figure is explained: shares of the measured seconds."""

    what: str
    figures: int
    median_error: float
    worst_error: float

    @classmethod
    def of(cls, what: str, found: Fit) -> Residual:
        return cls(what, len(found.residuals), found.median_error, found.worst_error)


def fitted_device(base: Device, samples: Sequence[DeviceSamples], *, known_peak: bool) -> tuple[Device, list[Residual]]:
    """``base`` with everything replaced that was measured on its neighbours too (the median of them).

    With ``known_peak`` the data sheet's peaks stay and shares of them are fitted; else the peak is what large matmuls
    approach.
    """
    one = _middle(samples)
    copied = max(2 * copy.bytes / copy.seconds for copy in one.copies)
    memory_share = min(1.0, copied / base.memory_bandwidth) if known_peak else 1.0
    if known_peak:
        device = replace(base, driver_memory=max(0.0, base.memory - one.memory_bytes))
    else:
        device = replace(base, memory_bandwidth=copied, memory=float(one.memory_bytes), driver_memory=0.0)
    device = replace(device, efficiency=replace(NOTHING, memory=memory_share))
    residuals = []
    for data_type in dict.fromkeys(product.data_type for product in one.products):
        chosen = [product for product in one.products if product.data_type == data_type]
        device, found = _with_products(device, data_type, chosen, known_peak=known_peak)
        residuals.append(Residual.of(f"products in {data_type}", found))
    if not known_peak:
        device = _with_formats(device, one.formats)
    device, forward, backward = _with_attention(device, one.attentions)
    residuals += [Residual.of("attention, forward", forward), Residual.of("attention, backward", backward)]
    if one.launch_seconds is not None:
        device = replace(device, efficiency=replace(device.efficiency, operator_seconds=one.launch_seconds))
    device, found = _with_steps(device, one.steps, calls_known=one.launch_seconds is not None)
    residuals.append(Residual.of("passes of small models", found))
    return _with_updates(device, one.steps), residuals


def _middle(samples: Sequence[DeviceSamples]) -> DeviceSamples:
    """The median over devices of every figure."""
    if len(samples) == 1:
        return samples[0]

    def middle(name: str, seconds: Sequence[str]) -> tuple[object, ...]:
        columns = zip(*(getattr(one, name) for one in samples))
        return tuple(
            replace(same[0], **{field: statistics.median(getattr(one, field) for one in same) for field in seconds})
            for same in columns
        )

    kinds = {
        "products": ("seconds",),
        "formats": ("seconds",),
        "attentions": ("forward_seconds", "backward_seconds"),
        "copies": ("seconds",),
        "host_copies": ("seconds",),
        "steps": ("passes_seconds", "update_seconds"),
    }
    return replace(samples[0], **{name: middle(name, seconds) for name, seconds in kinds.items()})  # type: ignore[arg-type]


def _with_products(
    device: Device, data_type: str, products: Sequence[ProductSample], *, known_peak: bool
) -> tuple[Device, Fit]:
    """Seconds at the asymptotic rate, what short inner dimensions lose, operands' bytes, and a call's own cost."""
    width = 4 if data_type == "fp32" else 2
    features = []
    for one in products:
        flops = 2.0 * one.rows * one.inner * one.columns
        moved = width * (one.rows * one.inner + one.inner * one.columns + one.rows * one.columns)
        features.append((flops, flops / one.inner, moved, 1.0))
    found = fit(features, [one.seconds for one in products])
    per_flop, rolloff, per_byte, _ = found.values
    peaks, shares = dict(device.peak), dict(device.efficiency.gemm)
    if known_peak:
        shares[data_type] = min(1.0, 1 / (per_flop * device.peak_flops(data_type)))
    else:
        peaks[data_type], shares[data_type] = 1 / per_flop, 1.0
        # What converts to fp32 and back is no faster than that; `_with_formats` knows better.
        peaks |= {narrow: peaks[data_type] for narrow in ("bf16", "fp16") if data_type == "fp32" and narrow in peaks}
        shares |= {narrow: 1.0 for narrow in ("bf16", "fp16") if data_type == "fp32"}
    efficiency = replace(
        device.efficiency,
        gemm=FrozenMapping(shares),
        gemm_rolloff=rolloff / per_flop,
        operand_traffic=per_byte * device.memory_bandwidth,
    )
    return replace(device, peak=FrozenMapping(peaks), efficiency=efficiency), found


def _with_formats(device: Device, formats: Sequence[ProductSample]) -> Device:
    """Peaks of other formats from fp32's, by the ratio of one matmul: a format without instructions is far slower."""
    seconds = {one.data_type: one.seconds for one in formats}
    others = {name: device.peak["fp32"] * seconds["fp32"] / one for name, one in seconds.items() if name != "fp32"}
    return replace(device, peak=FrozenMapping({**device.peak, **others}))


def _with_attention(device: Device, attentions: Sequence[AttentionSample]) -> tuple[Device, Fit, Fit]:
    counted = []
    for one in attentions:
        attended = (one.seq + 1) / 2 / one.seq
        scores = one.batch * one.seq * one.seq * one.heads * attended
        counted.append((scores * 4 * one.features, scores))
    forward = fit([(flops, scores, 1.0) for flops, scores in counted], [one.forward_seconds for one in attentions])
    per_flop, per_score, _ = forward.values
    score_flops = per_score / per_flop if per_flop else 0.0
    backward = fit(
        [(2.5 * (flops + score_flops * scores), 1.0) for flops, scores in counted],
        [one.backward_seconds for one in attentions],
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


def _with_steps(device: Device, steps: Sequence[StepSample], *, calls_known: bool) -> tuple[Device, Fit]:
    """What elementwise kernels move of the bytes that they need at least; and what a kernel costs to call, unless that
    was measured by itself: a GPU runs kernels while the next ones are called."""

    def priced(step: StepSample, **changes: float) -> float:
        efficiency = replace(device.efficiency, **changes)  # type: ignore[arg-type]
        job = step_job(step.shape, step.precision, replace(device, efficiency=efficiency))
        seconds = stage_seconds(job, _contents(job))
        return seconds.forward + seconds.backward

    known = [priced(step) for step in steps]
    names = ("elementwise_traffic",) if calls_known else ("elementwise_traffic", "operator_seconds")
    features = [[priced(step, **{name: 1.0}) - base for name in names] for step, base in zip(steps, known)]
    found = fit(features, [step.passes_seconds for step in steps], known)
    efficiency = replace(device.efficiency, **dict(zip(names, found.values)))  # type: ignore[arg-type]
    return replace(device, efficiency=efficiency), found


def _with_updates(device: Device, steps: Sequence[StepSample]) -> Device:
    """What an update costs besides the bytes that it moves."""
    beside = []
    for step in steps:
        job = step_job(step.shape, step.precision, device)
        beside.append(step.update_seconds - float(optimizer_seconds(job, _contents(job), sharding_of(job.strategy))))
    return replace(device, efficiency=replace(device.efficiency, step_seconds=max(0.0, statistics.median(beside))))


def _contents(job: Job) -> RankContents:
    return rank_contents(job, 0)
