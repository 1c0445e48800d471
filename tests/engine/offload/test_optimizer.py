"""Optimizer states in host memory or on a disk: the same weights, and the bytes that are priced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.offload.cases import assert_equal, priced_bytes, states_of
from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.engine.offload import states
from shardwise.engine.offload.store import Store
from shardwise.engine.parameters import local
from shardwise.layout.payloads import Payload
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Offload

STEPS = 3
CHUNK = 5_000  # small, so that there are many of them


def job(precision: str = "fp32", optimizer: str = "adamw", **strategy: Any) -> Job:
    training = {"global_batch": 4, "seq": 8, "precision": precision, "optimizer": optimizer}
    world = strategy.get("dp", 1) * strategy.get("tp", 1) * strategy.get("pp", 1)
    return Job.from_dict({"model": "tiny", "cluster": f"laptop:{world}", "strategy": strategy, "training": training})


def trained(one: Job, shares: tuple[float, ...] = ()) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Weights and states of this rank after some steps, with another share of the states offloaded before each."""
    states.CHUNK_ELEMENTS = CHUNK
    engine = Engine(one)
    if engine.store is not None:
        engine.store.lanes.moved.clear()
    for step in range(STEPS):
        if shares:
            engine.offload_optimizer(shares[step])
        engine.step(sample_batch(one, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    found = states_of(engine)
    found |= {f"{held.name} computed": local(held.parameter).clone() for held in engine.parameters}
    return found, dict(engine.store.lanes.moved) if engine.store is not None else {}


LAYOUTS: list[Any] = [
    (1, {"precision": "fp32"}),
    pytest.param(1, {"precision": "fp16"}, marks=pytest.mark.slow),
    pytest.param(1, {"precision": "fp16", "optimizer": "sgd-momentum"}, marks=pytest.mark.slow),
    pytest.param(2, {"dp": 2, "zero": 1, "precision": "fp16"}, marks=pytest.mark.slow),
    pytest.param(2, {"dp": 2, "zero": 2}, marks=pytest.mark.slow),
    (2, {"dp": 2, "zero": 3, "precision": "fp16"}),
    pytest.param(2, {"tp": 2, "precision": "fp16"}, marks=pytest.mark.slow),
    (2, {"pp": 2}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_the_same_weights_and_the_priced_bytes(world: int, layout: dict[str, Any]) -> None:
    here = on_ranks(world, trained, job(**layout))
    for share, target in ((1.0, "nvme"), (0.37, "cpu")):
        one = job(**layout, offload={"optimizer": share, "target": target})
        there = on_ranks(world, trained, one)
        for (expected, _), (found, _) in zip(here, there):
            assert_equal(found, expected, 1e-6)
        moved: Counter[Payload] = sum((Counter(counted) for _, counted in there), Counter())
        priced = priced_bytes(one, STEPS)
        assert dict(moved) == {
            payload: pytest.approx(size, rel=5e-3) for payload, size in priced.items()
        }  # vectors stay


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [{"precision": "fp16"}, {"dp": 2, "zero": 2}])
def test_states_move_between_steps(layout: dict[str, Any]) -> None:
    world = layout.get("dp", 1)
    here = on_ranks(world, trained, job(**layout))
    there = on_ranks(world, trained, job(**layout, offload={"optimizer": 0.5}), (0.2, 0.9, 0.0))
    for (expected, _), (found, _) in zip(here, there):
        assert_equal(found, expected, 1e-6)


def left_out() -> bool:
    """A step whose gradients are not finite changes nothing, in the store neither."""
    states.CHUNK_ELEMENTS = CHUNK
    engine = Engine(job(offload={"optimizer": 1, "target": "nvme"}))
    batch = sample_batch(engine.job, 0, 0)
    engine.step(batch)

    def everything() -> list[torch.Tensor]:
        read = engine.optimizer.read
        return [
            read(one.parameter, name).clone()
            for one in engine.parameters
            for name in ("master", "exp_avg", "exp_avg_sq")
        ]

    before = everything()
    engine.forward_backward(batch)
    gradient = engine.parameters[3].gradient
    assert gradient is not None
    gradient.view(-1)[0] = float("nan")
    engine.update()
    return all(torch.equal(one, other) for one, other in zip(before, everything()))


def test_a_step_that_is_not_finite_is_left_out() -> None:
    assert on_ranks(1, left_out) == [True]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file") as caught:
        Store(Offload(optimizer=1, target="nvme", folder=str(tmp_path / "gone")), torch.device("cpu"))
    assert str(caught.value).startswith("strategy.offload.folder")


def test_an_error_of_the_disk_is_raised_at_the_wait() -> None:
    """/dev/full takes no byte, as a disk that is full."""
    store = Store(Offload(optimizer=1, target="nvme"), torch.device("cpu"))
    region = store.region(8)
    with Path("/dev/full").open("r+b", buffering=0) as full:
        region.file._file = full  # type: ignore[attr-defined]
        copy = region.write(0, torch.zeros(2))
        with pytest.raises(SpecError, match="No space left"):
            copy.wait()


def test_muon_is_refused() -> None:
    with pytest.raises(SpecError, match="whole matrices"):
        Engine(job(optimizer="muon", offload={"optimizer": 1}))
