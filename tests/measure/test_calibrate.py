"""Calibration finds again what figures were made with, and says how well the rest is explained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.cost.stage_time import optimizer_seconds, stage_seconds
from shardwise.cost.stages import rank_contents
from shardwise.cost.states import sharding_of
from shardwise.measure.calibrate.device_fit import fitted_device
from shardwise.measure.calibrate.least_squares import fit
from shardwise.measure.calibrate.samples import (
    AttentionSample,
    CopySample,
    DeviceSamples,
    ProductSample,
    Shape,
    StepSample,
)
from shardwise.measure.calibrate.step_job import step_job
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.hardware import Device

BASE = Device(peak=FrozenMapping({"fp32": 1e12, "bf16": 1e12}), memory=2**34, memory_bandwidth=1e11, vendor="generic")
SHAPES = (Shape(2, 96, 6, 256, 1024, 4, 96), Shape(6, 48, 6, 128, 256, 8, 128), Shape(2, 64, 8, 128, 2048, 16, 64))


def _truth(rolloff: float, traffic: float, call: float, score_flops: float) -> Device:
    efficiency = Efficiency(
        gemm=FrozenMapping({"fp32": 1.0}), gemm_rolloff=rolloff, operand_traffic=0.5, memory=1.0,
        elementwise_traffic=traffic, operator_seconds=call, step_seconds=2e-3, attention_forward=0.4,
        attention_backward=0.5, score_flops=score_flops,
    )  # fmt: skip
    return replace(BASE, peak=FrozenMapping({"fp32": 4e10}), memory_bandwidth=2e10, efficiency=efficiency)


def _samples(device: Device) -> DeviceSamples:
    """What a device would measure if every price of it were true."""
    efficiency, peak = device.efficiency, device.peak["fp32"]
    products = []
    for rows, inner, columns in ((2048, 96, 96), (512, 512, 512), (1024, 32, 256), (256, 1024, 128), (4096, 64, 512)):
        flops, moved = 2 * rows * inner * columns, 4 * (rows * inner + inner * columns + rows * columns)
        seconds = flops / peak * (1 + efficiency.gemm_rolloff / inner) + 0.5 * moved / device.memory_bandwidth + 1e-5
        products.append(ProductSample("fp32", rows, inner, columns, seconds))
    attentions = []
    for batch, seq, heads, features in ((8, 96, 8, 8), (4, 256, 4, 16), (1, 512, 4, 64), (2, 384, 2, 128)):
        scores = batch * heads * seq * (seq + 1) / 2
        work = scores * (4 * features + efficiency.score_flops)
        forward, backward = work / (0.4 * peak) + 1e-5, 2.5 * work / (0.5 * peak) + 1e-5
        attentions.append(AttentionSample("fp32", batch, seq, heads, features, forward, backward))
    steps = []
    for shape in SHAPES:
        job = step_job(shape, "fp32", device)
        contents = rank_contents(job, 0)
        seconds = stage_seconds(job, contents)
        update = float(optimizer_seconds(job, contents, sharding_of(job.strategy)))
        steps.append(StepSample(shape, "fp32", seconds.forward + seconds.backward, update))
    copies = (CopySample(2**26, 2 * 2**26 / device.memory_bandwidth),)
    return DeviceSamples("a device", 1, 2**33, tuple(products), tuple(attentions), copies, tuple(steps))


@given(
    rolloff=st.sampled_from((0.0, 1.0, 100.0)),
    traffic=st.floats(0.5, 20),
    call=st.floats(1e-6, 1e-3),
    score_flops=st.sampled_from((0.0, 3.0, 200.0)),
)
@settings(max_examples=examples(20), deadline=None)
def test_a_device_is_found_again(rolloff: float, traffic: float, call: float, score_flops: float) -> None:
    truth = _truth(rolloff, traffic, call, score_flops)
    samples = _samples(truth)
    found, residuals = fitted_device(BASE, [samples, samples], known_peak=False)
    assert all(one.worst_error < 1e-6 for one in residuals), residuals
    assert found.peak["fp32"] == pytest.approx(4e10, rel=1e-5)
    assert found.memory_bandwidth == pytest.approx(2e10)
    for shape in (*SHAPES, Shape(4, 64, 8, 192, 512, 8, 128)):  # also of a model that was not measured
        measured, priced = (step_job(shape, "fp32", one) for one in (truth, found))
        expected, got = (stage_seconds(job, rank_contents(job, 0)) for job in (measured, priced))
        assert got.forward == pytest.approx(expected.forward, rel=1e-4)
        assert got.backward == pytest.approx(expected.backward, rel=1e-4)
    assert found.efficiency.step_seconds == pytest.approx(2e-3, rel=1e-4)


def test_a_data_sheets_peak_stays_and_gets_a_share() -> None:
    found, _ = fitted_device(BASE, [_samples(_truth(0, 1, 1e-5, 0))], known_peak=True)
    assert found.peak == BASE.peak
    assert found.memory_bandwidth == BASE.memory_bandwidth
    assert found.efficiency.gemm_share("fp32") == pytest.approx(0.04, rel=1e-4)
    assert found.efficiency.memory == pytest.approx(0.2)


@given(st.lists(st.sampled_from((0.0, 0.3, 2.0, 10.0)), min_size=2, max_size=4).filter(any), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_zero_or_more_is_found_again(values: list[float], seed: int) -> None:
    features = np.random.default_rng(seed).uniform(0.1, 1, (3 * len(values), len(values)))
    seconds = features @ np.array(values)
    assert fit(features.tolist(), seconds.tolist()).worst_error < 1e-6


def test_nothing_is_less_than_zero_and_residuals_say_so() -> None:
    found = fit([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [3.0, 2.0, 1.0])
    assert min(found.values) >= 0
    assert found.worst_error > 0.1
