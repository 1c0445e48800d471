"""States updated on the device, chunk by chunk: the same weights, and the bytes that are priced. Here without a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.offload.cases import assert_equal, priced_bytes, states_of
from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.offload import streamed
from shardwise.layout.payloads import STATES_TO_DEVICE, Payload, Role
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job

STEPS = 4
COUNTED = 2  # of them: the first finds weights on the device, and its update no states that came ahead
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 96, "name": "small"}


def job(offload: dict[str, Any], device: str = "cuda", **strategy: Any) -> Job:
    """For ranks that compute on GPUs, though these do not."""
    training = {"global_batch": 4, "seq": 32, "precision": strategy.pop("precision", "fp32")}
    return Job.from_dict(
        {
            "model": MODEL,
            "cluster": f"laptop:{strategy.get('dp', 1)}",
            "strategy": {**strategy, "offload": offload},
            "training": training,
            "run": {"device": device},
        }
    )


def trained(one: Job) -> tuple[dict[str, torch.Tensor], Counter[Payload]]:
    streamed.UPDATE_CHUNK_ELEMENTS = 1000  # many chunks, cut across parameters
    engine = Engine(one, device="cpu")
    assert (engine.optimizer.stored.streamed is not None) == one.strategy.offload.any
    for step in range(STEPS):
        if engine.store is not None and step == STEPS - COUNTED:
            engine.store.lanes.moved.clear()
        share = (engine.mesh.rank("dp"), engine.mesh.size("dp"))
        engine.step(sample_batch(one, step, 0).share(*share))
    moved: Counter[Payload] = Counter() if engine.store is None else Counter(engine.store.lanes.moved)
    return states_of(engine), moved


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("layout", "offload"),
    [
        ({}, {"optimizer": 1}),
        ({}, {"optimizer": 0.4}),
        ({"precision": "bf16"}, {"optimizer": 1}),
        ({"dp": 2, "zero": 2}, {"optimizer": 1}),
        ({"zero": 3}, {"optimizer": 1, "weights": 1}),
        ({"zero": 3, "microbatch": 2}, {"optimizer": 1, "weights": 1}),
        ({"dp": 2, "zero": 3}, {"optimizer": 1, "weights": 1}),
    ],
)
def test_the_same_weights_and_the_priced_bytes(layout: dict[str, Any], offload: dict[str, Any]) -> None:
    world = layout.get("dp", 1)
    here = on_ranks(world, trained, job({}, **layout))
    there = on_ranks(world, trained, job(offload, **layout))
    for (expected, _), (found, _) in zip(here, there):
        assert_equal(found, expected, 1e-6)
    moved = _by_role(sum((Counter(counted) for _, counted in there), Counter()))
    priced = _by_role(priced_bytes(job(offload, **layout), COUNTED))
    assert moved == {role: pytest.approx(size, rel=2e-2) for role, size in priced.items()}  # vectors stay


def _by_role(moved: Counter[Payload]) -> dict[Role, float]:
    """What comes ahead of an update and what comes with it together: as much as fits comes ahead."""
    found: Counter[Role] = Counter()
    for payload, size in moved.items():
        found[Role.STATES_FROM_HOST if payload.role in STATES_TO_DEVICE else payload.role] += size
    return dict(found)
