"""fp16 steps of the engine: they follow fp32, and where one rank overflows all of them leave the step out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.optim.optimizer import local
from shardwise.measure.reference import sample_batch
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.numerics import Numerics
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import LossScaling, Optimization, Training

DENSE = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, activation="swiglu", norm="rmsnorm")
MIXTURE = Model(
    layers=2, hidden=32, heads=4, ffn=64, vocab=64, activation="swiglu", norm="rmsnorm",
    moe=MixtureOfExperts(experts=4, top_k=2, ffn=32), numerics=Numerics(balance_loss=0.5),
)  # fmt: skip


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    scales: list[float]
    moved: list[bool]


def job_of(model: Model, strategy: dict[str, Any], precision: str, scaling: dict[str, Any]) -> Job:
    laid = Strategy(**{"dp": 1, **strategy})
    optimization = Optimization(loss_scaling=LossScaling(**scaling))
    training = Training(global_batch=8, seq=16, precision=precision, optimization=optimization)
    return Job(model=model, cluster=cluster_from(f"laptop:{laid.world}"), strategy=laid, training=training)


def trained(
    model: Model, strategy: dict[str, Any], precision: str = "fp16", scaling: dict[str, Any] | None = None,
    overflows: tuple[int, ...] = (), steps: int = 3,
) -> Run:  # fmt: skip
    """In the steps ``overflows`` one gradient of the last rank is made infinite, after all sums."""
    job = job_of(model, strategy, precision, scaling or {})
    engine, run = Engine(job), Run([], [], [], [])
    rank, size = engine.mesh.rank("dp"), engine.mesh.size("dp")
    for step in range(steps):
        before = [engine.optimizer.values(one.parameter).clone() for one in engine.parameters]
        loss = engine.forward_backward(sample_batch(job, step, 0).share(rank, size))
        if step in overflows and torch.distributed.get_rank() == job.strategy.world - 1:
            local(next(one.gradient for one in engine.parameters if one.gradient is not None)).view(-1)[0] = torch.inf
        run.losses.append(loss.item())
        run.norms.append(engine.update().item())
        run.scales.append(engine.scaler.scale.item() if engine.scaler else 1.0)
        after = (engine.optimizer.values(one.parameter) for one in engine.parameters)
        run.moved.append(any(not torch.equal(one, other) for one, other in zip(before, after)))
    return run


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (DENSE, {"dp": 2}),
        (DENSE, {"dp": 2, "zero": 3}),
        (DENSE, {"pp": 2}),
        (MIXTURE, {"dp": 2, "ep": 2}),
    ],
    ids=["zero 0", "zero 3", "pipeline", "mixture"],
)
def test_fp16_follows_fp32_whatever_its_scale(model: Model, strategy: dict[str, Any]) -> None:
    (exact,) = on_ranks(1, trained, model, {}, "fp32")
    for scale in (2.0**4, 2.0**10):
        for found in on_ranks(2, trained, model, strategy, "fp16", {"initial": scale}):
            assert found.moved == [True] * 3 and found.scales == [scale] * 3
            assert found.losses == pytest.approx(exact.losses, rel=3e-3)
            assert found.norms == pytest.approx(exact.norms, rel=2e-2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=["tp", "zero 3", "pp"])
def test_an_overflow_on_one_rank_is_a_step_left_out_on_all(strategy: dict[str, Any]) -> None:
    scaling = {"initial": 2.0**8, "hysteresis": 1, "window": 2}
    for found in on_ranks(2, trained, DENSE, strategy, "fp16", scaling, (1,), 5):
        assert found.moved == [True, False, True, True, True]
        assert found.scales == [2.0**8, 2.0**7, 2.0**7, 2.0**8, 2.0**8]


@pytest.mark.slow
def test_a_scale_that_is_too_large_is_found_out() -> None:
    scaling = {"initial": 2.0**30, "hysteresis": 1}
    found = on_ranks(2, trained, DENSE, {"dp": 2}, "fp16", scaling, (), 18)
    assert found[0].moved == found[1].moved and found[0].scales == found[1].scales
    assert not found[0].moved[0] and found[0].moved[-1]
    assert found[0].scales[-1] < 2.0**30


def test_a_static_scale_stays() -> None:
    for found in on_ranks(2, trained, DENSE, {"dp": 2}, "fp16", {"static": 64.0}, (0,), 2):
        assert found.moved == [False, True] and found.scales == [64.0] * 2
