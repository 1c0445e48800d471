"""What offload to a disk saves of the peak of tensors: what the planner says, with equal weights after ten steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from engine.workers import on_ranks
from shardwise.cost.memory import memory_of_rank
from shardwise.engine.engine import Engine
from shardwise.engine.offload.states import local
from shardwise.measure.sample import sample_batch
from shardwise.spec import Job
from shardwise.train.metrics.tensor_bytes import TensorBytes

MODEL = {"name": "deep", "layers": 8, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "vocab": 256}
STEPS = 10


def job(**offload: Any) -> Job:
    training = {"global_batch": 8, "seq": 128, "precision": "fp32"}
    strategy = {"microbatch": 8, "offload": {**offload, "target": "nvme"}}
    return Job.from_dict({"model": MODEL, "cluster": "laptop:1", "strategy": strategy, "training": training})


def trained(one: Job) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes of tensors at the most in the last of some steps, and the weights after it."""
    engine = Engine(one)
    for step in range(STEPS - 1):
        engine.step(sample_batch(one, step, 0))
    gc.collect()
    with TensorBytes() as memory:
        memory.watch(held.parameter for held in engine.parameters)
        memory.watch(local(state) for states in engine.optimizer.state.values() for state in states.values())
        memory.reset_peak()
        engine.step(sample_batch(one, STEPS - 1, 0))
    return memory.peak, {held.name: held.parameter.detach().clone() for held in engine.parameters}


@pytest.fixture(scope="module")
def plain() -> tuple[int, dict[str, torch.Tensor]]:
    (found,) = on_ranks(1, trained, job())
    return found


@pytest.mark.parametrize("offload", [{"activations": 0.5}, {"activations": 1}, {"optimizer": 1}])
def test_the_peak_falls_as_planned(offload: dict[str, float], plain: tuple[int, dict[str, torch.Tensor]]) -> None:
    one = job(**offload)
    ((peak, weights),) = on_ranks(1, trained, one)
    planned = memory_of_rank(job(), 0).total - memory_of_rank(one, 0).total
    assert plain[0] - peak == pytest.approx(planned, rel=0.1)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
