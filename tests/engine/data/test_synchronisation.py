"""Workers that do not sum gradients in every step: local SGD, DiLoCo, late sums; against the same by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.test_compressed_training import MODEL, planned_bytes
from engine.workers import on_ranks
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.measure.reference import sample_batch
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import Saver
from training.runs import boxes

ENDS = ("embedding.weight", "head.weight")


def job(synchronise: Any = "every-step", run: dict[str, Any] | None = None, **strategy: Any) -> Job:
    # A large epsilon: where a gradient is nearly zero, Adam would make rounding a whole step.
    optimization = {"learning_rate": 1e-2, "clip_norm": 0.5, "epsilon": 1e-4}
    strategy = {"dp": 2, "synchronise": synchronise, **strategy}
    batch = 4 * max(2, strategy["dp"])
    training = {"global_batch": batch, "seq": 16, "precision": "fp32", "optimization": optimization}
    devices = strategy["dp"] * strategy.get("tp", 1) * strategy.get("pp", 1)
    fields = {"model": MODEL, "cluster": f"laptop:{devices}", "strategy": strategy, "training": training}
    return Job.from_dict(fields if run is None else {**fields, "run": run})


def share_of(one: Job, step: int, rank: int, ranks: int) -> Batch:
    return sample_batch(one, step, 0).share(rank, ranks)


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {held.name: held.parameter.detach().clone() for held in engine.parameters}


def trained(one: Job, steps: int) -> dict[str, Any]:
    """The weights after every step, of this rank."""
    engine, found, losses = Engine(one), [], []
    for step in range(steps):
        result = engine.step(share_of(one, step, engine.mesh.rank("dp"), engine.mesh.size("dp")))
        losses.append(float(result.loss))
        found.append(weights_of(engine))
    sent = (engine.outer or engine.late).sent_bytes if engine.workers > 1 else 0  # type: ignore[union-attr]
    return {
        "weights": found,
        "losses": losses,
        "bytes": sent,
        "place": (engine.mesh.rank("tp"), engine.mesh.rank("pp")),
    }


def alone(one: Job, rank: int, steps: int) -> list[dict[str, Tensor]]:
    """A worker that never meets another, in one process."""
    single = job(dp=1)
    single = replace(single, training=replace(single.training, global_batch=4))
    (found,) = on_ranks(1, _alone, single, one, rank, steps)
    return found  # type: ignore[no-any-return]


def _alone(single: Job, one: Job, rank: int, steps: int) -> list[dict[str, Tensor]]:
    engine, found = Engine(single), []
    for step in range(steps):
        engine.step(share_of(one, step, rank, 2))
        found.append(weights_of(engine))
    return found


def test_between_meetings_a_worker_is_a_run_of_its_own() -> None:
    one = job({"method": "diloco", "inner_steps": 3})
    found = on_ranks(2, trained, one, 3)
    for rank, worker in enumerate(found):
        expected = alone(one, rank, 2)
        for step in range(2):
            for name, weight in expected[step].items():
                torch.testing.assert_close(worker["weights"][step][name], weight, rtol=1e-5, atol=1e-6)
    assert found[0]["losses"] != found[1]["losses"]


@pytest.mark.parametrize("method", ["local-sgd", "diloco"])
def test_an_outer_step_of_rate_1_without_momentum_is_the_mean(method: str) -> None:
    synchronise = {"method": method, "inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    one = job(synchronise)
    first, second = on_ranks(2, trained, one, 1)
    expected = [alone(one, rank, 1)[0] for rank in range(2)]
    for name, weight in first["weights"][0].items():
        assert torch.equal(weight, second["weights"][0][name])
        torch.testing.assert_close(weight, (expected[0][name] + expected[1][name]) / 2, rtol=1e-5, atol=1e-7)


def test_diloco_is_sgd_with_nesterov_momentum_on_the_way_that_workers_went() -> None:
    one = job({"method": "diloco", "inner_steps": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9})
    found = on_ranks(2, traced, one, 3)
    for name, first in found[0]["start"].items():
        outer = torch.nn.Parameter(first.clone())
        optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
        for meeting in range(3):
            before = torch.stack([worker["before"][meeting][name] for worker in found]).mean(dim=0)
            outer.grad = outer.detach() - before
            optimizer.step()
            for worker in found:
                torch.testing.assert_close(worker["after"][meeting][name], outer.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(found[0]["after"][meeting][name], found[1]["after"][meeting][name])


def traced(one: Job, meetings: int) -> dict[str, Any]:
    """The weights just before and just after each meeting."""
    engine = Engine(one)
    outer = engine.outer
    assert outer is not None
    found: dict[str, Any] = {"start": weights_of(engine), "before": [], "after": []}
    meet = outer.after_step

    def watched() -> bool:
        before = weights_of(engine)
        met = meet()
        if met:
            found["before"].append(before)
            found["after"].append(weights_of(engine))
        return met

    outer.after_step = watched  # type: ignore[method-assign]
    for step in range(2 * meetings):
        engine.step(share_of(one, step, engine.mesh.rank("dp"), 2))
    return found


@pytest.mark.slow
def test_what_is_sent_is_what_is_priced() -> None:
    for method in ("local-sgd", "diloco"):
        one = job({"method": method, "inner_steps": 4})
        for rank in on_ranks(2, trained, one, 8):
            assert rank["bytes"] == 8 * planned_bytes(one)
    one = job("async")
    for rank in on_ranks(2, trained, one, 3):
        assert rank["bytes"] == 3 * planned_bytes(one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("method", ["diloco", "async"])
def test_a_worker_may_be_several_ranks(method: str, layout: dict[str, int]) -> None:
    one = job({"method": method, "inner_steps": 2}, **layout)
    of_place: dict[Any, list[dict[str, Any]]] = {}
    for rank in on_ranks(4, trained, one, 4):
        of_place.setdefault(rank["place"], []).append(rank)
    for first, second in of_place.values():
        assert all(torch.equal(weight, second["weights"][3][name]) for name, weight in first["weights"][3].items())
    single = on_ranks(2, trained, job({"method": method, "inner_steps": 2}), 4)
    losses = [rank["losses"] for rank in of_place[max(of_place)]]
    assert losses[0] == pytest.approx(single[0]["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local-sgd", "diloco", "async"])
def test_both_ends_of_a_pipeline_keep_the_same_bits_of_a_tied_embedding(method: str) -> None:
    """Of three workers: the sum of three depends on their order, and the two ends meet in groups of their own."""
    one = job({"method": method, "inner_steps": 2}, dp=3, pp=2)
    ranks = on_ranks(6, trained, replace(one, model=replace(one.model, tied_embeddings=True)), 5)
    for step in (1, 3, 4):
        copies = [w for rank in ranks for name, w in rank["weights"][step].items() if name.endswith(ENDS)]
        assert len(copies) == 6
        if step < 4 or method == "async":
            assert all(torch.equal(copies[0], other) for other in copies[1:])
            continue
        # Between two meetings each worker has weights of its own, the same ones at both ends.
        assert len({tuple(one.flatten().tolist()) for one in copies}) == 3


# -- late sums -----------------------------------------------------------------------------------------


def late_by_hand(one: Job, staleness: int, steps: int) -> list[dict[str, Tensor]]:
    """One process, both workers' parts of a batch one after the other: their mean is applied some steps later."""
    engine, queue, found = Engine(one), [], []
    for step in range(steps):
        for rank in range(2):
            engine.forward_backward(share_of(job(), step, rank, 2))
        queue.append([held.parameter.grad / 2 for held in engine.parameters])  # type: ignore[operator]
        if len(queue) > staleness:
            for held, gradient in zip(engine.parameters, queue.pop(0)):
                held.parameter.grad = gradient
            engine.update()
        else:
            engine.data.after_step()
        found.append(weights_of(engine))
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [1, 2])
def test_late_sums_move_the_weights_so_many_steps_later(staleness: int) -> None:
    found = on_ranks(2, trained, job({"method": "async", "staleness": staleness}), 5)
    single = job(dp=1)
    single = replace(single, training=replace(single.training, global_batch=4))
    (expected,) = on_ranks(1, late_by_hand, single, staleness, 5)
    for step, weights in enumerate(expected):
        for name, weight in weights.items():
            assert torch.equal(found[0]["weights"][step][name], found[1]["weights"][step][name])
            torch.testing.assert_close(found[0]["weights"][step][name], weight, rtol=1e-4, atol=1e-4)


# -- state ---------------------------------------------------------------------------------------------


def resumed(one: Job, folder: str, steps: int, then: int) -> list[Any]:
    """Trains on after a checkpoint, and once more from the checkpoint: this rank's tensors of both."""
    engine, place = Engine(one), CheckpointFolder(Path(folder))

    def train(trainer: Engine, numbers: range) -> None:
        for step in numbers:
            trainer.step(share_of(one, step, engine.mesh.rank("dp"), 2))

    train(engine, range(steps))
    saver = Saver(engine, place)
    saver.save(steps, {}, wait=True)
    saver.finish()
    dist.barrier()
    train(engine, range(steps, steps + then))
    again = Engine(one, seed=5)
    load(again, place.of_step(steps))
    train(again, range(steps, steps + then))
    fresh = Engine(one, seed=5)
    load(fresh, place.of_step(steps), weights_only=True)
    return [boxes(engine), boxes(again), weights_of(fresh)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("synchronise", [
    {"method": "diloco", "inner_steps": 4}, {"method": "local-sgd", "inner_steps": 4},
    {"method": "async", "staleness": 2}, {"method": "async", "staleness": 5},
], ids=str)  # fmt: skip
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, synchronise: dict[str, Any]) -> None:
    """In the middle of a round too, when every worker has weights of its own."""
    ranks = on_ranks(2, resumed, job(synchronise), str(tmp_path), 6, 5)
    for before, after, _ in ranks:
        for (key, _, _, value), (_, _, _, again) in zip(before, after):
            assert (value == again).all(), key
    assert all(torch.equal(weight, ranks[1][2][name]) for name, weight in ranks[0][2].items())


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(SpecError, match=r"strategy.zero"):
        Engine(job("diloco", zero=1))
    with pytest.raises(SpecError, match=r"strategy.synchronise"):
        Engine(job("diloco", compression="int8"))
    with pytest.raises(SpecError, match=r"run.spikes.factor.*every worker sees its own losses"):
        job("diloco", run={"spikes": {"factor": 2.0}})
