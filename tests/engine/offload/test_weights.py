"""Weights and gradients in host memory or on a disk, with ZeRO: the same weights, and the bytes that are priced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from engine.offload.cases import assert_equal, priced_bytes, states_of
from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.offload import states
from shardwise.engine.refuse import require_runs
from shardwise.layout.payloads import Payload, Role
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

STEPS = 3
CHUNK = 5_000  # small, so that there are many of them
ALL = {"optimizer": 1.0, "weights": 1.0, "gradients": 1.0}
CLIP = {"clip_norm": 0.2}  # every step is clipped


def job(model: str = "tiny", precision: str = "fp32", **strategy: Any) -> Job:
    training = {"global_batch": 8, "seq": 16, "precision": precision, "optimization": CLIP}
    world = strategy.get("dp", 1) * strategy.get("tp", 1) * strategy.get("pp", 1)
    return Job.from_dict({"model": model, "cluster": f"laptop:{world}", "strategy": strategy, "training": training})


def trained(one: Job) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Weights and states of this rank after some steps, and what was moved for them."""
    states.CHUNK_ELEMENTS = CHUNK
    engine = Engine(one)
    for step in range(STEPS):
        if engine.store is not None and step == 1:  # in the first step weights are on the device already
            engine.store.lanes.moved.clear()
        engine.step(sample_batch(one, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    found = states_of(engine)
    moved = dict(engine.store.lanes.moved) if engine.store is not None else {}
    found["loss"] = engine.evaluate(sample_batch(one, STEPS, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    return found, moved


LAYOUTS: list[Any] = [
    {"dp": 2, "zero": 3},
    pytest.param({"dp": 2, "zero": 3, "precision": "fp16", "microbatch": 2}, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "zero": 3, "keep_parameters": True}, marks=pytest.mark.slow),
    {"dp": 1, "zero": 3, "microbatch": 4},
    pytest.param({"dp": 2, "pp": 2, "zero": 3}, marks=pytest.mark.slow),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_weights_and_the_priced_bytes(layout: dict[str, Any]) -> None:
    one, other = (job(**layout, offload={**ALL, "target": target}) for target in ("nvme", "cpu"))
    world = one.strategy.world
    here = on_ranks(world, trained, job(**layout))
    for asked in (one, other):
        there = on_ranks(world, trained, asked)
        for (expected, _), (found, _) in zip(here, there):
            assert_equal(found, expected, 1e-5)
        moved: Counter[Payload] = sum((Counter(counted) for _, counted in there), Counter())
        assert _both_passes(moved) == priced(asked)


SHARES: list[Any] = [
    pytest.param({"dp": 2, "zero": 3}, {"optimizer": 0.7, "weights": 0.4}, marks=pytest.mark.slow),
    ({"dp": 2, "zero": 2, "microbatch": 2}, {"optimizer": 0.8, "gradients": 0.6}),
    pytest.param({"dp": 4, "zero": 3, "shard_group": 2}, {"optimizer": 1.0, "weights": 0.5}, marks=pytest.mark.slow),
    pytest.param(
        *({"model": "tiny-moe", "dp": 2, "ep": 2, "zero": 3}, {**ALL, "weights": 0.5}), marks=pytest.mark.slow
    ),
    pytest.param({"dp": 2, "tp": 2, "zero": 3}, ALL, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "zero": 3, "recompute": "full"}, {**ALL, "gradients": 0.3}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "offload"), SHARES, ids=str)
def test_the_same_weights_with_a_share(layout: dict[str, Any], offload: dict[str, float]) -> None:
    one = job(**layout, offload={**offload, "target": "nvme"})
    there = on_ranks(one.strategy.world, trained, one)
    for (expected, _), (found, _) in zip(on_ranks(one.strategy.world, trained, job(**layout)), there):
        assert_equal(found, expected, 1e-5)


def priced(one: Job) -> dict[Role, Any]:
    """Bytes of all ranks and steps but the first."""
    return {role: pytest.approx(size, rel=5e-3) for role, size in _both_passes(priced_bytes(one, STEPS - 1)).items()}


def _both_passes(moved: Counter[Payload]) -> dict[Role, float]:
    """Weights of both passes together: a pipeline gathers ahead, from one pass into the other."""
    found: Counter[Role] = Counter()
    for payload, size in moved.items():
        found[payload.role] += size
    return dict(found)


@pytest.mark.parametrize(
    ("layout", "offload", "remedy"),
    [
        ({"dp": 2}, {"optimizer": 1, "weights": 1}, "zero: 3"),
        ({"dp": 2, "zero": 2}, {"optimizer": 1, "weights": 1}, "zero: 3"),
        ({"dp": 2, "zero": 1}, {"optimizer": 1, "gradients": 1}, "zero: 2"),
        ({"dp": 2, "zero": 3}, {"weights": 1}, "at least as large as offload.weights"),
        ({"dp": 2, "zero": 2, "accumulate": "local"}, {"optimizer": 1, "gradients": 1}, "accumulate: sharded"),
    ],
    ids=str,
)
def test_what_has_no_right_way_is_refused(layout: dict[str, Any], offload: dict[str, float], remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        require_runs(job(**layout, offload=offload))
