"""Calibration finds again what figures were made with, and says how well the rest is explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.cli.main import main
from shardwise.cost.step.stage_time import optimizer_seconds, stage_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.calibrate.device_samples import (
    AttentionSample,
    CopySample,
    DeviceSamples,
    MatmulSample,
    StepSample,
    StepShape,
    step_job,
)
from shardwise.measure.calibrate.fit import Residual, Wire, fit, fitted_cpu, fitted_level
from shardwise.measure.calibrate.link_samples import LinkSample, level_groups
from shardwise.spec.clusters import cluster_from
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import Efficiency
from shardwise.spec.hardware import Device
from shardwise.spec.network import NetworkLevel

BASE = Device(peak=FrozenMapping({"fp32": 1e12, "bf16": 1e12}), memory=2**34, memory_bandwidth=1e11, vendor="generic")
SHAPES = (
    StepShape(2, 96, 6, 256, 1024, 4, 96),
    StepShape(6, 48, 6, 128, 256, 8, 128),
    StepShape(2, 64, 8, 128, 2048, 16, 64),
)


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
    matmuls = []
    for rows, inner, columns in ((2048, 96, 96), (512, 512, 512), (1024, 32, 256), (256, 1024, 128), (4096, 64, 512)):
        flops, moved = 2 * rows * inner * columns, 4 * (rows * inner + inner * columns + rows * columns)
        seconds = flops / peak * (1 + efficiency.gemm_rolloff / inner) + 0.5 * moved / device.memory_bandwidth + 1e-5
        matmuls.append(MatmulSample("fp32", rows, inner, columns, seconds))
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
    return DeviceSamples("a device", 1, 2**33, tuple(matmuls), tuple(attentions), copies, tuple(steps))


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
    found, residuals = fitted_cpu(BASE, [samples, samples])
    assert all(one.worst_error < 1e-6 for one in residuals), residuals
    assert found.peak["fp32"] == pytest.approx(4e10, rel=1e-5)
    assert found.memory_bandwidth == pytest.approx(2e10)
    for shape in (*SHAPES, StepShape(4, 64, 8, 192, 512, 8, 128)):  # also of a model that was not measured
        measured, priced = (step_job(shape, "fp32", one) for one in (truth, found))
        expected, got = (stage_seconds(job, rank_contents(job, 0)) for job in (measured, priced))
        assert got.forward == pytest.approx(expected.forward, rel=1e-4)
        assert got.backward == pytest.approx(expected.backward, rel=1e-4)
    assert found.efficiency.step_seconds == pytest.approx(2e-3, rel=1e-4)


def test_formats_that_a_processor_has_no_instructions_for_are_priced_as_measured() -> None:
    """One that converts number by number takes a hundred times as long in bf16: a plan has to know."""
    formats = tuple(MatmulSample(name, 128, 96, 96, seconds) for name, seconds in (("fp32", 1e-4), ("bf16", 1e-2)))
    samples = replace(_samples(_truth(0, 1, 1e-5, 0)), formats=formats)
    found, _ = fitted_cpu(BASE, [samples, samples])
    assert found.peak["bf16"] == pytest.approx(found.peak["fp32"] / 100)
    shape = SHAPES[0]
    slow, quick = (step_job(shape, precision, found) for precision in ("bf16", "fp32"))
    assert (
        stage_seconds(slow, rank_contents(slow, 0)).forward > 10 * stage_seconds(quick, rank_contents(quick, 0)).forward
    )


@given(st.lists(st.sampled_from((0.0, 0.3, 2.0, 10.0)), min_size=2, max_size=4).filter(any), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_zero_or_more_is_found_again(values: list[float], seed: int) -> None:
    features = np.random.default_rng(seed).uniform(0.1, 1, (3 * len(values), len(values)))
    seconds = features @ np.array(values)
    assert Residual.of("", fit(features.tolist(), seconds.tolist())).worst_error < 1e-6


def test_nothing_is_less_than_zero_and_residuals_say_so() -> None:
    found = fit([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [3.0, 2.0, 1.0])
    assert min(found.values) >= 0
    assert Residual.of("", found).worst_error > 0.1


@given(
    trips=st.sampled_from((1.0, 2.0)),
    overhead=st.sampled_from((0.0, 1e-4, 1e-3)),
    startup=st.sampled_from((0.0, 5e-4)),
    efficiency=st.floats(0.5, 1),
)
@settings(max_examples=examples(10), deadline=None)
def test_a_link_is_found_again(trips: float, overhead: float, startup: float, efficiency: float) -> None:
    """Also what two pairs share, and a wire that is told from the software by its delays."""
    base = NetworkLevel(name="link", size=2, bandwidth=1.0, latency=0.0, ports=1)
    groups, rate = ((0, 2), (1, 3)), 25e6
    samples = []
    for delay in (1e-3, 3e-3):
        for active in (groups, groups[:1]):
            for kind, steps, share in (("all_reduce", 2, 1.0), ("all_gather", 1, 0.5)):
                for size in (2**10, 2**18, 2**22):
                    carried = len(active) * share * size
                    seconds = steps * (trips * delay + overhead) + startup + carried / (efficiency * rate)
                    for runner in ("backend", "schedules"):
                        samples.append(LinkSample(1, runner, kind, "ring", active, size, seconds, delay))  # type: ignore[arg-type]
    level, residuals = fitted_level(base, 1, (2, 2), samples, Wire(rate, 1e-3))
    assert all(one.worst_error < 1e-6 for one in residuals)
    for found in (level, level.run_by_schedules()):
        assert (found.trips, found.reached_share) == pytest.approx((trips, efficiency), rel=1e-4)
        assert (found.overhead, found.startup) == pytest.approx((overhead, startup), rel=1e-3, abs=1e-9)
    slower = replace(level, latency=5e-3)
    assert slower.latency_per_step == pytest.approx(trips * 5e-3 + overhead, rel=1e-4)


def test_levels_join_the_ranks_of_their_members() -> None:
    assert level_groups((2, 3), 0) == ((0, 1), (2, 3), (4, 5))
    assert level_groups((2, 3), 1) == ((0, 2, 4), (1, 3, 5))


def test_this_machine_becomes_a_cluster_to_plan_with(tmp_path: Path) -> None:
    """Of what two processes measure here, by the command; the figures themselves are not judged."""
    path = tmp_path / "cluster.yaml"
    assert main(["calibrate", "--processes", "2", "--only", "links,storage", "--out", str(path)]) == 0
    cluster = cluster_from(str(path))
    assert cluster.devices == 2
    level = cluster.levels[-1]
    assert level.schedules is not None
    assert 1e6 < level.bandwidth_per_direction < 1e12
    assert "shardwise calibrate" in cluster.source
    flags = "--model tiny --seq 128 --global-batch 8 --precision fp32 --dp 2"
    job = ["analyze", *flags.split(), "--cluster", str(path)]
    assert main(job) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "everything"], "--only: 'everything' is not measured"),
        (["--out", "/nowhere/cluster.yaml"], "--out: /nowhere/cluster.yaml cannot be written"),
        (["--from", "runs/none", "--processes", "2"], "--processes: cannot be combined with --from"),
        (["--processes", "none"], "--processes"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
