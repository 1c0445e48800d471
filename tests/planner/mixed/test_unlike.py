"""Replicas with unlike shares and stages of unlike degrees: their prices, and that a plan finds and runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.parity import check
from planner.mixed.test_plan import asked, mixed_of, small_plan
from shardwise.cost.analysis import analyze
from shardwise.planner.candidate import candidate
from shardwise.planner.constraints import Constraints, parse_constraints
from shardwise.planner.mixed.plan import plan_mixed
from shardwise.spec.clusters import cluster_from, mixed_kinds
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.training import Training


def job(cluster: Any, batch: int = 64, model: str = "llama3.2-1b", **strategy: Any) -> Job:
    training = {"global_batch": batch, "seq": 4096}
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": strategy, "training": training})


def slower(name: str, times: float) -> Cluster:
    """The same devices with a fraction of their speed."""
    cluster = cluster_from(name)
    device = cluster.device
    peak = {kind: value / times for kind, value in device.peak.items()}
    return replace(cluster, name=f"slow-{name}", device=replace(device, name=f"slow-{device.name}", peak=peak))


def test_equal_stages_written_one_by_one_cost_the_same() -> None:
    plain = candidate(job("dgx-h100", pp=2, tp=2, dp=2))
    listed = candidate(job("dgx-h100", pp=2, stage_tp=[2, 2], stage_dp=[2, 2]))
    assert listed.step_seconds == pytest.approx(plain.step_seconds, rel=1e-9)
    assert listed.memory == plain.memory
    assert sum(listed.parts.values()) == pytest.approx(listed.step_seconds)


def test_each_stage_has_the_memory_of_its_degrees() -> None:
    even, unlike = (
        analyze(job("dgx-h100", pp=2, **fields)) for fields in ({"tp": 4}, {"stage_tp": [4, 2], "stage_dp": [1, 2]})
    )
    assert unlike.memories[0].weights == even.memories[0].weights
    assert unlike.memories[1].weights == pytest.approx(2 * even.memories[1].weights, rel=0.01)


def test_replicas_that_take_unlike_shares_end_together() -> None:
    """A kind of half the speed: with half the microbatches it takes as long as the other."""
    kinds = {"kinds": ["dgx-h100", slower("dgx-h100", 2.0)]}
    seconds = {
        shares: candidate(job(kinds, 96, dp=16, zero=1, dp_shares=shares)).step_seconds
        for shares in (None, (2,) * 8 + (1,) * 8, (1,) * 8 + (2,) * 8)
    }
    even, fitting, wrong = seconds.values()
    assert fitting < 0.8 * even < even < wrong


def test_a_job_on_several_kinds_is_a_job_file() -> None:
    one = job("dgx-h100+dgx-a100:2", pp=3, tp=8, stage_layers=[8, 4, 4])
    again = Job.from_yaml(one.to_yaml())
    assert again == one
    mixed = mixed_kinds(again.cluster)
    assert mixed is not None and [kind.devices for kind in mixed.kinds] == [8, 16]
    assert one.peak_flops == sum(kind.devices * kind.device.peak_flops("bf16") for kind in mixed.kinds)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"tp": 16}, "tp would go across the kinds of nodes; put pp or dp last in order"),
        ({"pp": 4, "stage_dp": [4, 2, 8, 2]}, "8 devices of a stage would be of two kinds"),
    ],
)
def test_a_group_is_of_one_kind(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job("dgx-h100+dgx-a100", **strategy)


@pytest.mark.slow
def test_a_plan_takes_unlike_degrees_where_they_are_faster() -> None:
    """4 and 8 devices: equal stages of 4 need three of them, the best has one stage of each kind or replicas."""
    kinds, constraints = mixed_of("workstation-4090", "dgx-h100"), parse_constraints("microbatch=1,recompute=none")
    request = asked("llama3.2-1b", kinds, Training(global_batch=64, seq=4096), constraints=Constraints(constraints))
    untied = replace(request.job.model, tied_embeddings=False, published_parameters=None)
    found = plan_mixed(replace(request, job=request.job.unchecked(model=untied)), alone=False)
    ways = [step.arrangement.strategy for step in found.candidates]
    assert any(one.has_unlike_stages for one in ways) and any(one.dp_shares for one in ways)
    assert found.status == "runs"
    equal = [s.seconds_per_token for s, w in zip(found.candidates, ways) if not (w.has_unlike_stages or w.dp_shares)]
    assert found.best.seconds_per_token <= 1.005 * min(equal)
    for step in found.candidates[:3]:
        assert candidate(step.job).step_seconds == pytest.approx(step.step_seconds, rel=1e-9)


@pytest.mark.slow
def test_what_is_planned_runs() -> None:
    """The plan for one slow and two quick processes, against one process."""
    kinds = mixed_of(slower("laptop:1", 2.0), "laptop:2")
    found = small_plan(kinds, "schedule=1f1b,microbatch=1,recompute=none")
    one = found.best.job
    model = Job.from_dict({"model": "tiny", "cluster": "laptop:1", "training": {"global_batch": 4, "seq": 32}}).model
    layers: Any = "balanced" if one.strategy.pp > 1 else one.strategy.stage_layers
    small = replace(
        one,
        model=model,
        strategy=replace(one.strategy, stage_layers=layers),
        training=replace(one.training, seq=32, precision="fp32", global_batch=one.strategy.batch_multiple * 2),
    )
    check(small)
