"""Number formats of a job, and the scale of an fp16 loss over its steps."""

from __future__ import annotations

import pytest
import torch

from engine.data.cases import UNEVEN, Case, Trained, alone, together
from engine.workers import on_ranks
from shardwise.engine.optim.precision import FP32, LossScaler, Precision, precision_of
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import LossScaling, Training

HALF = Precision(torch.bfloat16, torch.bfloat16)
MIXED = Precision(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", FP32),
        ("bf16", HALF),
        ("bf16-fp32-grads", MIXED),
        ("fp16", Precision(torch.float16, torch.float16, scaled=True)),
        ("fp8", Precision(torch.bfloat16, torch.float32, scaling="tensor")),
        ("fp8-delayed", Precision(torch.bfloat16, torch.float32, scaling="tensor", delayed=True)),
        ("fp8-rowwise", Precision(torch.bfloat16, torch.float32, scaling="row")),
        ("fp8-blockwise", Precision(torch.bfloat16, torch.float32, scaling="block")),
    ],
)
def test_recipes_are_formats(name: str, expected: Precision) -> None:
    assert precision_of(Training(precision=name)) == expected


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int8"])
def test_what_this_engine_cannot_compute_in_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="bf16"):
        precision_of(Training(precision=name))


def run(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: g(ood) or b(ad)."""
    scales = []
    for step in steps:
        scaler.update(torch.tensor(float(step == "b")))
        scales.append(scaler.scale.item())
    return scales


def test_the_scale_grows_after_a_window_and_falls_after_patience() -> None:
    scaler = LossScaler(LossScaling(initial=8, window=3, hysteresis=2, minimum=2), "cpu")
    assert run(scaler, "ggg") == [8, 8, 16]
    assert run(scaler, "b") == [16]  # one bad step is forgiven
    assert run(scaler, "b") == [8]
    assert run(scaler, "bb") == [8, 4]
    assert run(scaler, "bbbbbb")[-1] == 2  # never below the minimum
    assert run(scaler, "ggbggg")[-3:] == [2, 2, 4]  # a bad step starts the window anew


def test_a_static_scale_stays_and_a_saved_one_returns() -> None:
    assert run(LossScaler(LossScaling(static=128), "cpu"), "bgggbb") == [128] * 6
    scaler, other = (
        LossScaler(LossScaling(initial=8, window=2), "cpu"),
        LossScaler(LossScaling(initial=64, window=2), "cpu"),
    )
    run(scaler, "gb")
    for name, tensor in other.state_dict().items():
        tensor.copy_(scaler.state_dict()[name])
    assert run(other, "bgg") == run(scaler, "bgg")


@pytest.mark.parametrize("wrong", [{"initial": 0}, {"window": 0}, {"hysteresis": 0}, {"minimum": -1}, {"static": 0}])
def test_senseless_scales_are_refused(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(SpecError, match=f"loss_scaling.{name}"):
        Training.from_dict({"optimization": {"loss_scaling": wrong}})


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", [HALF, MIXED], ids=["bf16 gradients", "fp32 gradients"])
@pytest.mark.parametrize(
    "strategy",
    [Strategy(dp=2), Strategy(dp=2, zero=1), Strategy(dp=2, zero=2), Strategy(dp=2, zero=3)],
    ids=["zero 0", "zero 1", "zero 2", "zero 3"],
)
def test_bf16_follows_fp32(strategy: Strategy, precision: Precision) -> None:
    """Masters in fp32: losses as near as bf16 lets them be, and equal masters on all ranks."""
    expected = alone(Case(Strategy(), UNEVEN))
    results: list[Trained] = on_ranks(2, together, Case(strategy, UNEVEN, microbatches=2, precision=precision))
    for found in results:
        assert found.losses == pytest.approx(expected.losses, rel=3e-3)
        assert found.norms == pytest.approx(expected.norms, rel=3e-2)
        for name, weight in found.weights.items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, results[0].weights[name])
