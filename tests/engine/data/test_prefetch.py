"""When parameters are gathered: a layer before the one that runs first has computed, in both passes, which is what the
price hides; and in every step the same, whatever came before it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.workers import on_ranks
from shardwise.cost.traffic.data import data_traffic
from shardwise.engine import torch_private
from shardwise.engine.engine import Engine
from shardwise.layout.payloads import Role
from shardwise.layout.stages import rank_contents
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job

LAYERS = 4
JOB = Job.from_dict(
    {
        "model": {"layers": LAYERS, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 96, "name": "small"},
        "cluster": "laptop:2",
        "strategy": {"dp": 2, "zero": 3},
        "training": {"global_batch": 2, "seq": 32, "precision": "fp32"},
    }
)


def order() -> list[str]:
    """What a rank starts in its second step: gathers, and the computation of each layer's MLP in each pass."""
    engine = Engine(JOB)
    log: list[str] = []
    layers: Any = engine.stages[0].layers
    for number, layer in enumerate(layers.values()):
        (group,) = torch_private.parameter_groups(layer)
        _log_gathers(group, number, log)
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: log.append(f"forward {number}"))
        layer.mlp.register_full_backward_pre_hook(lambda *_, number=number: log.append(f"backward {number}"))
    for step in range(2):
        log.clear()
        engine.step(sample_batch(JOB, step, 0).share(engine.mesh.rank("dp"), 2))
    return log


def _log_gathers(group: Any, number: int, log: list[str]) -> None:
    unshard = group.unshard

    def logged(async_op: bool = False) -> None:
        if not group.is_unsharded and not torch_private.is_gathering(group):
            log.append(f"gather {number}")
        unshard(async_op)

    group.unshard = logged


def test_the_next_layer_is_gathered_before_this_one_has_computed() -> None:
    for log in on_ranks(2, order):
        first, second = log[: log.index(f"backward {LAYERS - 1}")], log[log.index(f"forward {LAYERS - 1}") + 1 :]
        for number in range(LAYERS - 1):
            assert first.index(f"gather {number + 1}") < first.index(f"forward {number}"), log
            # Below the layer that runs: the last one's gather comes with the head's, or is its own.
            assert second.index(f"gather {number}") < second.index(f"backward {number + 1}"), log
        assert log.count("gather 0") == 2  # once for each pass


def test_all_gathers_of_layers_but_the_first_may_be_hidden() -> None:
    gathers = [one for one in data_traffic(JOB, rank_contents(JOB, 0)) if one.payload.role is Role.PARAMETERS]
    assert {one.window for one in gathers} == {"forward", "backward"}
    assert all(one.unhideable == 1 / LAYERS for one in gathers)


def gathers_of_steps(text: str) -> list[list[str]]:
    """What each of four steps gathers, by number of unit and in order; between the last two the model is evaluated."""
    job = Job.from_yaml(text)
    engine = Engine(job)
    found: list[list[str]] = []
    log: list[str] = []
    units = [unit for part in engine.data.parts.values() for unit in getattr(part, "units", ())]
    for number, group in enumerate(group for unit in units for group in torch_private.parameter_groups(unit)):
        _log_gathers(group, number, log)
    batch = sample_batch(job, 0, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp"))
    for step in range(4):
        log.clear()
        engine.step(batch)
        found.append(list(log))
        if step == 2:
            for _ in range(2):
                engine.evaluate(batch)
            engine.data.after_evaluation()
    return found


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"pp": 2, "ep": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, *SLOW], ids=str)
def test_a_step_gathers_the_same_after_an_evaluation(layout: dict[str, int]) -> None:
    fields = JOB.to_dict()
    if "ep" in layout:
        fields["model"] |= {"moe": {"experts": 4, "top_k": 2, "ffn": 64}}
    for zero in (1, 2, 3):
        strategy = {"dp": 2, "zero": zero, **layout}
        job = Job.from_dict({**fields, "cluster": f"laptop:{2 * layout.get('pp', 1)}", "strategy": strategy,
                             "training": {"global_batch": 8, "seq": 32, "precision": "fp32"}})  # fmt: skip
        for steps in on_ranks(job.strategy.world, gathers_of_steps, job.to_yaml()):
            assert steps[1] and steps[1] == steps[2] == steps[3]
