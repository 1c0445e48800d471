"""Training whose gradients are summed by a named schedule: equal to one process, refused where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.running import run, run_json
from cost.sweep.test_sweep import table_of
from engine.parity import check
from engine.workers import on_ranks
from shardwise.cost.analysis import analyze
from shardwise.cost.step.prediction import predict
from shardwise.cost.traffic.data import gradient_times
from shardwise.engine.engine import Engine
from shardwise.engine.refuse import require_runs
from shardwise.layout.gradient_schedules import choose, gradient_groups
from shardwise.layout.payloads import Role
from shardwise.measure.reference import sample_batch
from shardwise.report.analysis import collective_lines
from shardwise.spec.errors import SpecError
from shardwise.spec.files import dump_yaml
from shardwise.spec.job import Job

BETWEEN = {"name": "between", "size": 2, "bandwidth": "1Gb/s", "latency": "1ms", "ports": 1}
INSIDE = {"name": "inside", "size": 2, "bandwidth": "1GB/s", "latency": "50us"}


def job(measured: bool = False, model: str = "tiny", **strategy: Any) -> Job:
    """Two nodes of two ranks; ``measured``: gloo shakes hands before every message, our executor ahead of them."""
    inside, between = dict(INSIDE), dict(BETWEEN)
    if measured:
        inside.update(overhead="200us", schedules={"overhead": "200us"})
        between.update(trips=2.5, overhead="200us", schedules={"trips": 1.2, "overhead": "200us"})
    cluster = {"name": "two nodes", "device": "cpu", "levels": [inside, between], "devices_per_node": 2,
               "library": "gloo"}  # fmt: skip
    training = {"global_batch": 8, "seq": 32, "precision": "fp32"}
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": strategy, "training": training})


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy",
    [
        {"dp": 4, "collective": "hierarchical"},
        {"dp": 4, "collective": "hierarchical_pipelined(ring,recursive_doubling)"},
        {"dp": 4, "zero": 2, "collective": "hierarchical"},
        {"dp": 2, "pp": 2, "zero": 0, "collective": "ring"},
    ],
    ids=str,
)
def test_training_equals_one_process(strategy: dict[str, Any]) -> None:
    check(job(**strategy))


def chosen_names(one: Job) -> set[str]:
    """What a step sums its gradients by, on this rank."""
    engine = Engine(one)
    engine.step(sample_batch(one, 0, 0, "cpu").share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    (part,) = engine.data.parts.values()
    sums = part.sums if hasattr(part, "sums") else part.reductions[0].sums  # type: ignore[union-attr]
    return {"the backend's own" if schedule is None else schedule.algorithm for schedule in sums._chosen.values()}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"dp": 4, "collective": "hierarchical"}, {"hierarchical"}),
        ({"dp": 4, "collective": "ring"}, {"flat_ring"}),
        ({"dp": 4, "zero": 3, "collective": "hierarchical_pipelined"}, {"hierarchical_pipelined"}),
        ({"dp": 4}, {"the backend's own"}),
    ],
    ids=str,
)
def test_what_is_named_is_what_runs(strategy: dict[str, Any], expected: set[str]) -> None:
    assert on_ranks(4, chosen_names, job(**strategy)) == [expected] * 4


def test_auto_takes_a_schedule_only_where_measurements_say_that_it_pays() -> None:
    for measured in (False, True):
        one = job(measured, dp=4)
        ((_, _, kind, runs),) = gradient_groups(one)
        found = choose(kind, 2.0**24, one.cluster, runs, "auto")
        assert (found.schedule is not None) == measured
        assert found.seconds <= found.backend_seconds
    assert found.algorithm.startswith("hierarchical")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"dp": 2, "pp": 2, "order": ["dp", "pp", "tp", "cp"], "collective": "hierarchical"}, "hierarchical"),
        ({"dp": 4, "collective": "parallel_rings"}, "parallel_rings"),
        ({"dp": 4, "zero": 2, "collective": "halving_doubling"}, "halving_doubling"),
        ({"dp": 4, "collective": "hierarchical(ring,magic)"}, "magic"),
    ],
    ids=str,
)
def test_what_has_no_schedule_on_the_group_is_refused(strategy: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        require_runs(job(**strategy))
    assert str(caught.value).startswith("strategy.collective") and "\n" not in str(caught.value)


def test_analyze_says_what_the_chosen_collective_saves() -> None:
    (time,) = gradient_times(analyze(job(True, dp=4)))
    assert time.seconds < 0.9 * time.backend_seconds
    assert gradient_times(analyze(job(dp=4))) == []
    lines = list(collective_lines(gradient_times(analyze(job(True, dp=4, collective="hierarchical")))))
    assert len(lines) == 1 and "Gradients by hierarchical" in lines[0] and "saves" in lines[0]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("collective", ["auto", "hierarchical", "ring"])
def test_what_runs_is_what_is_priced(zero: int, collective: str) -> None:
    """By analyze and by the planner's tables alike; where nothing was measured as before."""
    prices = []
    for measured in (False, True):
        one = job(measured, dp=4, zero=zero, collective=collective)
        assert table_of(one)[0] == pytest.approx(predict(one).step_seconds, rel=1e-9)
        sent = analyze(one).dimension_traffics("dp")
        (traffic,) = (traffic for traffic in sent if traffic.payload.role is Role.GRADIENTS)
        prices.append(traffic.cost)
    if collective == "auto":
        assert prices[0].algorithm in ("flat_ring", "direct") and prices[1].algorithm.startswith("hierarchical")


def test_plan_says_it_too(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_yaml(job(True, dp=4).cluster.to_dict()), encoding="utf-8")
    asked = f"--model tiny --cluster {path} --global-batch 8 --seq 32 --precision fp32 --dp 4 --zero 0"
    found = run("plan", *asked.split(), "--out", "-", "--details")
    assert found.status == 0, found.err
    assert "Gradients by hierarchical" in found.out and "instead of" in found.out
    (sums,) = run_json("analyze", *asked.split(), "--json")["gradient_sums"]
    assert sums["seconds"] < sums["backend_seconds"] and sums["algorithm"].startswith("hierarchical")
