"""From figures that a GPU would give, its constants are found again, and steps that were not measured are priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cost.analysis import analyze
from shardwise.cost.compute.roofline import operator_seconds
from shardwise.cost.step.stage_time import optimizer_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.calibrate.fit_gpu import _attention, _priced, fitted_gpu, fitted_power
from shardwise.measure.calibrate.gpu_samples import (
    ATTENTIONS,
    CAPPED,
    FP8_LAYERS,
    GROUPS,
    LAYERS,
    PRODUCTS,
    WINDOWED,
    AttentionFigure,
    CopyFigure,
    GpuFigure,
    GpuSamples,
    Mix,
    ProductFigure,
)
from shardwise.measure.calibrate.steps import CASES, CaseSample, StepCase, case_job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import LAYER_PARTS, PASSES, SCALINGS, Efficiency, EngineKernels
from shardwise.spec.hardware import Device
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.numerics import Numerics
from shardwise.spec.stack import default_stack
from shardwise.spec.training import RECIPES

BASE = cluster_from("dgx-h200").device
OWN = EngineKernels(
    eager=FrozenMapping(zip(PASSES, (1.7, 6.0, 23.0, 1.8))),
    compiled=FrozenMapping(zip(PASSES, (1.05, 3.0, 1.5, 1.1))),
    layer_seconds=FrozenMapping(zip(LAYER_PARTS, (2e-4, 2e-4, 3e-4, 1e-4, 4e-4))),
    host_seconds=FrozenMapping(zip(LAYER_PARTS, (1e-3, 2e-3, 2e-3, 1e-3, 1e-3))),
    routing=FrozenMapping(eager=6.0, compiled=4.0),
    update_traffic=0.8, loss_traffic=1.4, scaled=FrozenMapping(tensor=0.8, row=0.82, block=0.6),
    casts=FrozenMapping(tensor=2.0, row=2.2, block=1.6), score_traffic=6.0, windowed_attention=0.5,
    capped_attention=0.3,
)  # fmt: skip
TRUTH = replace(
    BASE,
    efficiency=Efficiency(
        gemm=FrozenMapping({**BASE.efficiency.gemm, "bf16": 0.9, "fp16": 0.9, "fp8": 0.82}), gemm_rolloff=230.0,
        gemm_tail=2.4e5, operand_traffic=0.0, expert_gemm=0.95, expert_rolloff=90.0, memory=0.87,
        attention_forward=0.8, attention_backward=0.7, attention_rolloff=128.0, score_flops=200.0,
        backward_rolloff=256.0, backward_score_flops=120.0, head_features=64,
        operator_seconds=0.0, step_seconds=4e-3, power_slowdown=1.18, attention_slowdown=1.06, other_power=0.7, own=OWN,
    ),
)  # fmt: skip
UNSEEN = Model(layers=5, hidden=1536, heads=12, kv_heads=4, ffn=6144, vocab=49152, max_seq=4096, activation="swiglu",
               norm="rmsnorm", qk_norm=True)  # fmt: skip


def _figures(device: Device) -> list[GpuFigure]:
    attentions = [AttentionFigure(*sizes, both) for sizes in ATTENTIONS for both in (False, True)]
    attentions += [AttentionFigure(*WINDOWED, True, window=4096), AttentionFigure(*CAPPED, True, softcap=50.0)]
    products = [ProductFigure(*shape, product) for shape in LAYERS for product in PRODUCTS]
    products += [ProductFigure(rows, inner, columns, product, experts)
                 for experts, rows, inner, columns in GROUPS for product in PRODUCTS]  # fmt: skip
    products += [ProductFigure(*shape, product, scaling=scaling)
                 for shape in FP8_LAYERS for scaling in SCALINGS for product in PRODUCTS]  # fmt: skip
    part = 0.7 * len(attentions) / (len(attentions) + len(products))
    slowed = device.efficiency.slowdown_at(0.7 - part, part)
    bare = replace(device.efficiency, own=replace(OWN, casts=FrozenMapping(dict.fromkeys(SCALINGS, 0.0))))
    casts_apart = replace(device, efficiency=bare)
    found: list[GpuFigure] = [replace(one, seconds=slowed * _priced(one, casts_apart)) for one in products]
    for one in attentions:
        operator = replace(_attention(one), windowed=one.window is not None, capped=one.softcap is not None)
        seconds = operator_seconds(operator, device, RECIPES["bf16"], default_stack())
        found.append(replace(one, seconds=slowed * (seconds.total if one.both else seconds.forward)))
    return [*found, CopyFigure(2**28, 2 * 2**28 / (0.87 * device.memory_bandwidth))]


def _sample(case: StepCase) -> CaseSample:
    job = case_job(case, TRUTH)
    update = float(optimizer_seconds(job, rank_contents(job, 0), sharding_of(job.strategy)))
    return CaseSample(case, analyze(job).predicted_seconds, update)


@pytest.fixture(scope="module")
def found() -> Device:
    mixes = (
        *(Mix(share, 1e-3 * TRUTH.efficiency.slowdown_at(share)) for share in (1.0, 0.8, 0.65, 0.5, 0.3)),
        *(Mix(share, 2e-3 * TRUTH.efficiency.slowdown_at(0.0, share), attention=True) for share in (1.0, 0.4)),
    )
    samples = GpuSamples(tuple(_figures(TRUTH)), 0.7, mixes, tuple(map(_sample, CASES)))
    device, residuals = fitted_gpu(BASE, samples, 140 * 2**30)
    assert all(one.worst_error < 0.02 for one in residuals), residuals
    return device


def test_the_power_limit_is_found_again() -> None:
    truth = Efficiency(power_slowdown=1.24, attention_slowdown=1.1, other_power=0.6)
    mixes = [Mix(share, 2.0 * truth.slowdown_at(share)) for share in (1.0, 0.85, 0.7, 0.5, 0.2)]
    mixes += [Mix(share, 1.0 * truth.slowdown_at(0.0, share), attention=True) for share in (1.0, 0.3)]
    assert fitted_power(mixes) == (pytest.approx(1.24), pytest.approx(1.1), pytest.approx(0.6))


def test_constants_are_found_again(found: Device) -> None:
    own, efficiency = found.efficiency.own, found.efficiency
    assert own is not None
    assert efficiency.gemm_share("bf16") == pytest.approx(0.9, rel=0.01)
    assert efficiency.attention_forward == pytest.approx(0.8, rel=0.02)
    assert own.scaled["block"] == pytest.approx(0.6, rel=0.02)
    assert own.windowed_attention == pytest.approx(0.5, rel=0.02)
    assert own.capped_attention == pytest.approx(0.3, rel=0.02)
    assert own.update_traffic == pytest.approx(0.8, rel=0.01)
    assert own.eager["rotary"] == pytest.approx(23.0, rel=0.2)
    assert own.host_launches("eager", rotary=True, moe=False) == pytest.approx(2e-3, rel=0.05)


@pytest.mark.parametrize(
    "case",
    [
        StepCase(UNSEEN, 4, 2048),
        StepCase(UNSEEN, 2, 4096, compile=True),
        StepCase(UNSEEN, 2, 4096, "fp8-rowwise", compile=True),
        StepCase(UNSEEN, 1, 256, graphs=False),
        StepCase(replace(UNSEEN, moe=MixtureOfExperts(experts=16, top_k=4, ffn=1024)), 2, 4096),
        StepCase(replace(UNSEEN, sliding_window=1024), 2, 4096),
        StepCase(replace(UNSEEN, numerics=Numerics(attention_softcap=50.0)), 2, 4096),
    ],
)
def test_steps_that_were_not_measured_are_priced(found: Device, case: StepCase) -> None:
    expected, priced = (analyze(case_job(case, device)).predicted_seconds for device in (TRUTH, found))
    assert priced == pytest.approx(expected, rel=0.03)


def test_a_step_of_few_matmuls_runs_at_full_clock() -> None:
    efficiency = TRUTH.efficiency
    assert efficiency.slowdown(0.2, 0.0, 0.8) == 1
    slowed = efficiency.slowdown(0.9, 0.0, 0.1)
    assert slowed == pytest.approx(efficiency.slowdown_at(0.9 * slowed / (0.9 * slowed + 0.1)))
    assert 1 < slowed < efficiency.slowdown(1.0, 0.0, 0.0) == pytest.approx(1.18)
    assert efficiency.slowdown(0.5, 0.4, 0.1) < slowed  # attention draws less
