"""Activations on a disk between the passes: the same weights, about the bytes that are priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.workers import on_ranks
from shardwise.cost.traffic.offload import offload_traffic
from shardwise.engine.engine import Engine
from shardwise.engine.parameters import local
from shardwise.layout.payloads import Role, sent_backward, sent_forward
from shardwise.layout.stages import rank_contents
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job

STEPS = 2


def job(model: Any = "tiny", seq: int = 64, batch: int = 8, precision: str = "fp32", **strategy: Any) -> Job:
    training = {"global_batch": batch, "seq": seq, "precision": precision}
    world = strategy.get("dp", 1) * strategy.get("tp", 1) * strategy.get("pp", 1) * strategy.get("cp", 1)
    return Job.from_dict({"model": model, "cluster": f"laptop:{world}", "strategy": strategy, "training": training})


def trained(one: Job) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    engine = Engine(one)
    for step in range(STEPS):
        engine.step(sample_batch(one, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    weights = {held.name: local(held.parameter).clone() for held in engine.parameters}
    return weights, dict(engine.store.lanes.moved) if engine.store is not None else {}


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {"microbatch": 4}),
    ("tiny", {"dp": 2, "zero": 3}),
    ("tiny", {"tp": 2}),
    ("tiny", {"pp": 2}),
    ("tiny", {"pp": 2, "schedule": "zbv"}),
    ("tiny-moe", {"dp": 2, "ep": 2, "zero": 1}),
    ("tiny", {"microbatch": 4, "recompute": "full"}),
    ("tiny", {"dp": 2, "zero": 3, "recompute": "full"}),
    ("tiny", {"tp": 2, "recompute": "full"}),
    ("tiny", {"pp": 2, "schedule": "zbv", "recompute": "full"}),
    ("tiny-moe", {"dp": 2, "ep": 2, "zero": 1, "recompute": "full"}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_the_same_weights(model: str, layout: dict[str, Any]) -> None:
    here, one = job(model, **layout), job(model, **layout, offload={"activations": 0.7, "target": "nvme"})
    world = one.strategy.world
    there = on_ranks(world, trained, one)
    for (expected, _), (found, moved) in zip(on_ranks(world, trained, here), there):
        assert moved[sent_forward(Role.ACTIVATIONS_TO_HOST)] == moved[sent_backward(Role.ACTIVATIONS_FROM_HOST)] > 0
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_about_the_priced_bytes() -> None:
    one = job(microbatch=4, offload={"activations": 1.0})
    ((_, moved),) = on_ranks(1, trained, one)
    for line in offload_traffic(one, rank_contents(one, 0)):
        assert moved[line.payload] == pytest.approx(STEPS * line.count * line.size_bytes, rel=0.1)
