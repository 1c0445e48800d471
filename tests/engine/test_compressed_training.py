"""Training with compressed gradients: equal weights on all ranks, the bytes of the plan, exact resume, buckets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.workers import on_ranks
from shardwise.cost.traffic.execution import step_traffic
from shardwise.engine.data.apply import Replicated
from shardwise.engine.engine import Engine
from shardwise.layout.stages import rank_contents
from shardwise.measure.reference import sample_batch
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.less_communication import COMPRESSIONS
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import Saver
from training.runs import boxes

METHODS = COMPRESSIONS[1:]
EXACT = 2  # steps, where a method has to begin with some
# Sizes whose every matrix is whole blocks for two ranks.
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 128, "max_seq": 32}


def compressing(method: str, **fields: Any) -> dict[str, Any]:
    return {"method": method, "exact_steps": EXACT if method == "1bit-adam" else 0, **fields}


def job(compression: Any = "none", model: dict[str, Any] | str = MODEL, **strategy: Any) -> Job:
    training = {"global_batch": 8, "seq": 16, "precision": "fp32", "optimization": {"learning_rate": 1e-2}}
    strategy = {"dp": 2, "compression": compression, **strategy}
    devices = strategy["dp"] * strategy.get("tp", 1) * strategy.get("pp", 1)
    fields = {"model": model, "cluster": f"laptop:{devices}", "strategy": strategy, "training": training}
    return Job.from_dict(fields)


def trained(one: Job, steps: int) -> dict[str, Any]:
    engine = Engine(one)
    share = (engine.mesh.rank("dp"), engine.mesh.size("dp"))
    losses = [float(engine.step(sample_batch(one, 0, 0).share(*share)).loss) for _ in range(steps)]
    weights = {held.name: held.parameter.detach().clone() for held in engine.parameters}
    place = engine.mesh.rank("tp"), engine.mesh.rank("pp")
    return {"losses": losses, "weights": weights, "bytes": engine.data.compressed_bytes, "place": place}


def planned_bytes(one: Job) -> float:
    return sum(t.bytes_sent for t in step_traffic(one, rank_contents(one, 0)) if t.dimension == "dp")


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_stay_equal_and_send_what_is_planned(method: str) -> None:
    one = job(compressing(method, rank=2, block=32))
    first, second = on_ranks(2, trained, one, 6)
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert first["bytes"] == second["bytes"] == (6 - one.strategy.compression.exact_steps) * planned_bytes(one)


def test_blocks_that_do_not_divide_are_priced_whole() -> None:
    one = job({"method": "int8", "block": 1000})
    assert on_ranks(2, trained, one, 1)[0]["bytes"] == planned_bytes(one)


# Each method is run alone above; the one with most state of its own stands for all beside other dimensions.
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "powersgd")), "1bit-adam"]
)
def test_beside_tensor_and_pipeline_parallelism(method: str) -> None:
    """Every rank of a replica has parameters of its own; those with the same stay equal."""
    one = job(compressing(method, rank=2, block=32), tp=2, pp=2, schedule="zb-h1")
    of_place: dict[Any, list[dict[str, Tensor]]] = {}
    for rank in on_ranks(8, trained, one, EXACT + 2):
        of_place.setdefault(rank["place"], []).append(rank["weights"])
    for first, second in of_place.values():
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bf16", "powersgd"])
def test_beside_experts(method: str) -> None:
    one = job({"method": method, "rank": 1}, model="tiny-moe", dp=4, ep=2)
    found = on_ranks(4, trained, one, 2)
    for name, weight in found[0]["weights"].items():
        assert torch.equal(weight, found[2]["weights"][name])  # ranks 0 and 2 have the same experts


def bucket_sizes(one: Job) -> list[int]:
    engine = Engine(one)
    (part,) = engine.data.parts.values()
    assert isinstance(part, Replicated)
    return [bucket.bytes for bucket in part.buckets]


def test_buckets_are_of_the_size_asked_for() -> None:
    assert len(on_ranks(2, bucket_sizes, job())[0]) == 1
    small = on_ranks(2, bucket_sizes, job(bucket="1KiB"))[0]
    assert len(small) >= 3 and min(small[:-1]) >= 1024
    plain, cut = on_ranks(2, trained, job(), 3)[0], on_ranks(2, trained, job(bucket="1KiB"), 3)[0]
    assert plain["losses"] == pytest.approx(cut["losses"], rel=1e-6)


def resumed(one: Job, folder: str, steps: int, then: int) -> list[Any]:
    """Trains on after a checkpoint, and once more from the checkpoint: this rank's tensors of both."""
    engine, place = Engine(one), CheckpointFolder(Path(folder))
    share = (engine.mesh.rank("dp"), engine.mesh.size("dp"))

    def train(trainer: Engine, numbers: range) -> None:
        for step in numbers:
            trainer.step(sample_batch(one, step, 0).share(*share))

    train(engine, range(steps))
    saver = Saver(engine, place)
    saver.save(steps, {}, wait=True)
    saver.finish()
    dist.barrier()
    train(engine, range(steps, steps + then))
    again = Engine(one, seed=5)
    load(again, place.of_step(steps))
    train(again, range(steps, steps + then))
    return [boxes(engine), boxes(again)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("method", "steps"), [("int8", 3), ("powersgd", 3), ("1bit", 3), ("1bit-adam", 1), ("1bit-adam", 3)]
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, method: str, steps: int) -> None:
    """What error feedback keeps back is part of the state, of every rank."""
    for before, after in on_ranks(2, resumed, job(compressing(method, rank=2)), str(tmp_path), steps, 3):
        assert any(key.startswith("feedback/") for key, *_ in before)
        for (key, _, _, value), (_, _, _, again) in zip(before, after):
            assert (value == again).all(), key


def test_what_it_does_not_go_with_is_refused() -> None:
    for fields in ({"zero": 1}, {"zero": 3}):
        with pytest.raises(SpecError, match=r"strategy.zero.*compressed there"):
            Engine(job("int8", **fields))
    with pytest.raises(SpecError, match="block"):
        job({"method": "int8", "block": 12})
    with pytest.raises(SpecError, match=r"exact_steps.*there are none"):
        job("1bit-adam")
    other = job(compressing("1bit-adam"))
    with pytest.raises(SpecError, match=r"training.optimizer.*momentum of AdamW"):
        Engine(replace(other, training=replace(other.training, optimizer="sgd-momentum")))
