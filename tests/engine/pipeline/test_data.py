"""Data parallelism around a pipeline: gradients summed once or with every microbatch, parameters kept or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.pipeline import toy_pipeline as toy
from engine.workers import on_ranks
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.data.apply import apply_data
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optim.precision import precision_of
from shardwise.engine.parameters import local
from shardwise.engine.pipeline.tied import tie_ends
from shardwise.spec.schedules import job_schedules
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

EVERY_SCHEDULE = job_schedules()

SCHEDULES = tuple(name for name in EVERY_SCHEDULE if name != "dualpipe")
SETTINGS: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 2, local": {"zero": 2, "accumulate": "local"},
    "zero 3, kept": {"zero": 3, "keep_parameters": True},
    "zero 3, kept, local": {"zero": 3, "keep_parameters": True, "accumulate": "local"},
}
RESHARDED: dict[str, dict[str, Any]] = {"zero 3": {"zero": 3}, "zero 3, local": {"zero": 3, "accumulate": "local"}}
MICROBATCHES, STEPS = 4, 3


def strategy_for(schedule: str, setting: dict[str, Any], **more: Any) -> Strategy:
    interleave = 2 if schedule == "interleaved" else 1
    return Strategy(**({"dp": 2, "pp": 2, "schedule": schedule, "interleave": interleave} | setting | more))


def trained(strategy: Strategy, tied_model: bool, precision: str = "fp32") -> dict[str, Any]:
    """Steps of SGD on dp x pp ranks: the losses, and this rank's weights, whole, at the end."""
    mesh, settings = build_mesh(strategy), precision_of(Training(precision=precision))
    pipeline, dp = mesh.group("pp"), strategy.data_parallel
    schedule = toy.schedule_for(strategy.schedule, strategy.pp, MICROBATCHES)
    model = toy.whole_model(schedule.stages, tied_model)
    modules: dict[int, nn.Module] = {
        index: toy.stage_of(model, index, schedule.stages) for index in schedule.stages_of(pipeline.rank())
    }
    tied = tie_ends(modules, schedule.placement, dist.get_process_group_ranks(pipeline)) if tied_model else None
    if tied and tied.group and tied.readers:
        with torch.no_grad():
            tied.weight.add_(1.0)  # values that only `copy` makes right
    data = apply_data(list(modules.values()), mesh, settings, patterns=toy.PATTERNS)
    if tied:
        tied.copy_of(tied.weight)
        tied.follow()
    data.start()
    runner = toy.runner_of(schedule, modules, pipeline, data.parts, tied, settings.compute)
    parameters = named(modules)
    optimizer = torch.optim.SGD([data.masters.get(one, one) for one in parameters.values()], lr=0.5)
    batch = toy.batch_of(dp * MICROBATCHES * toy.ROWS)
    share = batch.share(mesh.rank("dp"), dp)
    losses = []
    for _ in range(STEPS):
        loss = runner.step(share.microbatches(MICROBATCHES), batch.counted)
        all_reduce_sum(loss, mesh.group("dp"))
        losses.append(loss)
        if tied:
            tied.add_gradients()
        for parameter, master in data.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        data.publish()
        data.after_step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": {name: whole(one) for name, one in named(modules).items()}}


def named(modules: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{index}:{name}": one for index, module in modules.items() for name, one in module.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    return parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else local(parameter.detach())


def expected(stages: int, tied: bool, dp: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = toy.whole_model(stages, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = toy.reference(model, toy.batch_of(dp * MICROBATCHES * toy.ROWS))
        losses.append(loss)
        optimizer.step()
    return losses, {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}


def check(strategy: Strategy, tied: bool = False, precision: str = "fp32", tolerance: float = 1e-5) -> list[Any]:
    stages = toy.schedule_for(strategy.schedule, strategy.pp, MICROBATCHES).stages
    losses, weights = expected(stages, tied, strategy.data_parallel)
    results = on_ranks(strategy.world, trained, strategy, tied, precision)
    for result in results:
        for found, loss in zip(result["losses"], losses):
            assert toy.deviation(found, loss) < tolerance
        for name, weight in result["weights"].items():
            assert toy.deviation(weight, weights[name.partition(":")[2]]) < tolerance, name
    return results


QUICK = {(schedule, "zero 1") for schedule in SCHEDULES} | {
    ("1f1b", "zero 0"), ("zbv", "zero 0"), ("interleaved", "zero 2"), ("dualpipev", "zero 2"), ("1f1b", "zero 3"),
    ("zb-h1", "zero 3"), ("zbv", "zero 3, local"),
}  # fmt: skip
ALL = {(schedule, setting) for schedule in SCHEDULES for setting in SETTINGS | RESHARDED}
FOLDED = ("zbv", "v-half", "v-min", "dualpipev")


@pytest.mark.quick(4)
@pytest.mark.parametrize(("schedule", "setting"), sorted(QUICK))
def test_every_schedule(schedule: str, setting: str) -> None:
    check(strategy_for(schedule, (SETTINGS | RESHARDED)[setting]))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "setting"), sorted(ALL - QUICK))
def test_every_schedule_with_every_setting(schedule: str, setting: str) -> None:
    check(strategy_for(schedule, (SETTINGS | RESHARDED)[setting]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("zero", [1, 2])
def test_hybrid_sharding(schedule: str, zero: int) -> None:
    check(strategy_for(schedule, {"zero": zero, "dp": 4, "shard_group": 2}))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("schedule", "setting"), [("1f1b", "zero 1"), ("zb-h2", "zero 0"), ("dualpipev", "zero 1")])
@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32-grads"])
def test_16_bits(schedule: str, setting: str, precision: str) -> None:
    check(strategy_for(schedule, SETTINGS[setting]), precision=precision, tolerance=3e-2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("schedule", "setting"), [("1f1b", "zero 1"), ("interleaved", "zero 2"), ("zb-h1", "zero 0")])
def test_two_copies_of_a_tied_embedding_stay_equal(schedule: str, setting: str) -> None:
    """Bit for bit, from different first values."""
    results = check(strategy_for(schedule, SETTINGS[setting]), tied=True)
    weights = {name: weight for result in results for name, weight in result["weights"].items()}
    last = toy.schedule_for(schedule, 2, MICROBATCHES).stages - 1
    assert torch.equal(weights["0:embedding.weight"], weights[f"{last}:head.weight"])


@pytest.mark.quick(1)
@pytest.mark.parametrize(("schedule", "setting"), [("zbv", "zero 0"), ("zbv", "zero 2"), ("dualpipev", "zero 1")])
def test_a_folded_pipeline_has_one_tied_parameter(schedule: str, setting: str) -> None:
    results = check(strategy_for(schedule, SETTINGS[setting]), tied=True)
    assert all("3:head.weight" not in result["weights"] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "setting"), sorted(ALL))
def test_tied_embeddings_with_everything(schedule: str, setting: str) -> None:
    if schedule in FOLDED and setting in RESHARDED:
        pytest.skip("the head borrows the embedding's parameter, which has to stay")
    check(strategy_for(schedule, (SETTINGS | RESHARDED)[setting]), tied=True)
