"""What recompute and offload to a disk save of the peak of tensors: what the planner says, with equal weights after
some steps."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from engine.workers import on_ranks
from shardwise.cost.memory.device import memory_of_rank
from shardwise.engine.collectives import reductions
from shardwise.engine.collectives.reductions import SCRATCH
from shardwise.engine.data.fsdp import IN_FLIGHT
from shardwise.engine.engine import Engine
from shardwise.engine.parameters import local
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job
from shardwise.spec.parameters import layer_parameters
from shardwise.training.memory import TensorBytes

MODEL = {"name": "deep", "layers": 8, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "vocab": 256}
STEPS, MANY_STEPS = 4, 10
DIVIDED = {"dp": 2, "zero": 3, "microbatch": 1}


def job(layout: dict[str, Any] | None = None, **offload: Any) -> Job:
    strategy = {"microbatch": 8, **(layout or {}), "offload": {**offload, "target": "nvme"}}
    # What ZeRO divides does not grow with the tokens; what activations take must be most of the peak.
    training = {"global_batch": 4 if layout == DIVIDED else 8, "seq": 128, "precision": "fp32"}
    cluster = f"laptop:{strategy.get('dp', 1)}"
    return Job.from_dict({"model": MODEL, "cluster": cluster, "strategy": strategy, "training": training})


def trained(one: Job, steps: int = STEPS) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of tensors at the most in the last of some steps, and the weights after it."""
    # How much memory gloo's exchanges keep for the next one is a matter of time; here they keep none.
    with mock.patch.object(reductions, "TEMPORARY_BYTES", 2**18), mock.patch.object(SCRATCH, "free", []):
        return _trained(one, steps)


def _trained(one: Job, steps: int) -> tuple[int, dict[str, torch.Tensor]]:
    engine = Engine(one)
    data = engine.mesh.rank("dp"), engine.mesh.size("dp")
    for step in range(steps - 1):
        engine.step(sample_batch(one, step, 0).share(*data))
    gc.collect()
    with TensorBytes() as memory:
        memory.watch(local(held.parameter) for held in engine.parameters)
        memory.watch(local(state) for states in engine.optimizer.state.values() for state in states.values())
        memory.reset_peak()
        engine.step(sample_batch(one, steps - 1, 0).share(*data))
    return memory.peak, {held.name: engine.optimizer.read(held.parameter, "master") for held in engine.parameters}


@pytest.fixture(scope="module")
def plain() -> tuple[int, dict[str, torch.Tensor]]:
    (found,) = on_ranks(1, trained, job())
    return found


SAVERS: list[Any] = [
    {"activations": 0.5},
    {"activations": 1},
    {"optimizer": 1},
    pytest.param({"layout": {"recompute": "selective"}}, marks=pytest.mark.slow),
    pytest.param({"layout": {"recompute": "full"}}, marks=pytest.mark.slow),
    {"activations": 1, "layout": {"recompute": "full"}},
]


@pytest.mark.slow
@pytest.mark.parametrize("saver", SAVERS, ids=str)
def test_the_peak_falls_as_planned(saver: dict[str, Any], plain: tuple[int, dict[str, torch.Tensor]]) -> None:
    one = job(**saver)
    ((peak, weights),) = on_ranks(1, trained, one)
    planned = memory_of_rank(job(), 0).total - memory_of_rank(one, 0).total
    assert plain[0] - peak == pytest.approx(planned, rel=0.1)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_ten_steps_end_with_the_same_weights() -> None:
    everything = {"activations": 0.5, "optimizer": 1}
    ((_, expected),), ((_, weights),) = (on_ranks(1, trained, one, MANY_STEPS) for one in (job(), job(**everything)))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def divided() -> list[tuple[int, dict[str, torch.Tensor]]]:
    return on_ranks(2, trained, job(DIVIDED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload",
    [
        pytest.param({"optimizer": 1, "weights": 1}, marks=pytest.mark.slow),
        {"optimizer": 1, "weights": 0.5},
        pytest.param({"optimizer": 1, "gradients": 1}, marks=pytest.mark.slow),
    ],
)
def test_with_zero(offload: dict[str, float], divided: list[tuple[int, dict[str, torch.Tensor]]]) -> None:
    one, plain = job(DIVIDED, **offload), job(DIVIDED)
    planned = memory_of_rank(plain, 0).total - memory_of_rank(one, 0).total
    # What two of gloo's exchanges have received waits to be added, but not where the sums leave at once.
    received = IN_FLIGHT * 4 * layer_parameters(one.model, *one.model.kinds).total / 2 if "gradients" in offload else 0
    for (before, expected), (peak, weights) in zip(divided, on_ranks(2, trained, one)):
        assert before - peak - received == pytest.approx(planned, rel=0.1)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
