"""Plans across kinds of nodes: against one cluster of equal nodes, against trying everything, and by what must hold."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from shardwise.cost.step.simulation import boundary_seconds
from shardwise.planner.candidate import candidate
from shardwise.planner.constraints import Constraints, parse_constraints
from shardwise.planner.mixed.plan import MixedPlan, divided, fits_kinds, plan_mixed, polished
from shardwise.planner.mixed.step import Arrangement, MixedRequest, MixedSpace, MixedStep, mixed_step
from shardwise.planner.search.stages import pieces_of
from shardwise.report.mixed import mixed_data, mixed_page
from shardwise.spec import presets
from shardwise.spec.clusters import MixedCluster, cluster_from, parse_mixed
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def model(name: str) -> Model:
    return presets.load("model", Model, name)


def mixed_of(*kinds: Cluster | str, **more: Any) -> MixedCluster:
    found = parse_mixed({"kinds": list(kinds), **more})
    assert found is not None
    return found


def with_memory(name: str, gigabytes: float) -> Cluster:
    cluster = cluster_from(name)
    return replace(cluster, device=replace(cluster.device, memory=gigabytes * 2**30))


def arrangement(mixed: MixedCluster, order: tuple[int, ...], name: str, batch: int, **strategy: Any) -> Arrangement:
    """A strategy over the kinds, its dp filled in."""
    stage = mixed.devices // strategy["pp"]
    whole = Strategy(dp=stage // strategy.get("tp", 1), **strategy)
    one = Job(model=model(name), cluster=mixed.kinds[0], training=Training(seq=4096))
    return Arrangement(mixed, order, one.unchecked(strategy=whole, training=Training(seq=4096, global_batch=batch)))


def placed(own: Arrangement, memory_bytes: float | None = None) -> MixedStep:
    """The arrangement with its layers where the planner puts them."""
    request = MixedRequest(own.job, memory_bytes=memory_bytes, mixed=own.mixed)
    pieces = {kind: pieces_of(own.timing_job(kind)) for kind in own.kinds}
    ways = [mixed_step(way) for way in divided(request, own, pieces)]
    return polished(request, min(ways, key=lambda step: step.step_seconds))


def small_plan(
    mixed: MixedCluster, fixed: str = "tp=4,schedule=1f1b,microbatch=1", *, alone: bool = False, **more: Any
) -> MixedPlan:
    constraints = Constraints(parse_constraints(fixed))
    options = {"constraints": constraints, **more}
    return plan_mixed(asked("llama3.2-1b", mixed, Training(global_batch=64, seq=4096), **options), alone=alone)


def asked(name: str, mixed: MixedCluster, training: Training, **options: Any) -> MixedRequest:
    job = Job(model=model(name), cluster=mixed.kinds[0], training=replace(training, global_batch=None))
    return MixedRequest(job.unchecked(strategy=Strategy(), training=training), mixed=mixed, **options)


# -- reading ------------------------------------------------------------------------------------------


def test_the_ways_to_name_one(tmp_path: Path) -> None:
    mixed = parse_mixed("dgx-h100:4+dgx-a100:8")
    assert mixed is not None
    assert [kind.devices for kind in mixed.kinds] == [32, 64]
    assert mixed.name == "dgx-h100:4 + dgx-a100:8"
    assert parse_mixed(" dgx-h100:4 + dgx-a100:8 ") == mixed
    assert parse_mixed({"kinds": ["dgx-h100:4", "dgx-a100:8"]}) == mixed == parse_mixed(mixed.to_dict())
    file = tmp_path / "both.yaml"
    file.write_text("kinds: [dgx-h100:4, dgx-a100:8]\nlink: ethernet-100g\n")
    slow = parse_mixed(str(file))
    assert slow is not None
    assert slow.link is not None
    assert slow.between.bandwidth_per_direction == 100e9 / 8


@pytest.mark.parametrize("value", ["dgx-h100:4", {"device": "h100-sxm"}, None, 4])
def test_other_clusters_are_not_mixed(value: Any) -> None:
    assert parse_mixed(value) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dgx-h100:4+dgx-x100", "kinds: unknown cluster 'dgx-x100'"),
        ("dgx-h100:4+", "is not a cluster"),
        ({"kinds": ["dgx-h100:4"]}, "kinds: 1 kinds of nodes; give 2 or 3"),
        ({"kinds": "dgx-h100:4"}, "should be a list of clusters"),
        ({"kinds": ["dgx-h100:4", "dgx-a100"], "speed": 1}, "speed: unknown field"),
    ],
)
def test_mistakes_are_one_line(value: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_mixed(value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_between_kinds_is_the_slower_outermost_link() -> None:
    mixed = mixed_of("dgx-h100:4", "dgx-a100:8")
    assert mixed.between.bandwidth_per_direction == 25e9  # HDR of the A100, not NDR
    shared = mixed_of("workstation-4090:2", "dgx-h100")
    assert shared.between.bandwidth_per_direction == pytest.approx(10e9 / 8 / 4)  # one port for four devices


# -- the step -----------------------------------------------------------------------------------------

STRATEGIES: list[dict[str, Any]] = [
    {"tp": 8, "pp": 4, "zero": 1},
    {"tp": 8, "pp": 2, "zero": 1},
    {"tp": 2, "pp": 4, "zero": 3, "keep_parameters": True},
    {"tp": 2, "pp": 4, "zero": 2},
    {"tp": 4, "pp": 4, "zero": 1, "schedule": "interleaved", "interleave": 2},
    {"tp": 4, "pp": 4, "zero": 1, "schedule": "zbv"},
    {"tp": 4, "pp": 4, "zero": 1, "schedule": "zb-h2", "recompute": "full"},
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b"])
def test_two_equal_kinds_are_one_cluster(name: str, strategy: dict[str, Any]) -> None:
    """Every stage has whole nodes, so all messages go over the same network: equal to rounding."""
    mixed = mixed_of("dgx-h100:2", "dgx-h100:2")
    training = Training(global_batch=64, seq=4096)
    whole = Job(model=model(name), cluster=cluster_from("dgx-h100:4"), training=training, strategy=Strategy(**strategy))
    own = Arrangement(mixed, (0, 1), whole.with_strategy(stage_layers=stage_layer_counts(whole.model, whole.strategy)))
    step, expected = mixed_step(own), candidate(whole)
    assert step.step_seconds == pytest.approx(expected.step_seconds, rel=1e-9)
    assert step.mfu == pytest.approx(expected.mfu, rel=1e-9)
    assert max(step.memory(0).total, step.memory(1).total) == pytest.approx(expected.memory.total)


def test_experts_stay_inside_a_kind() -> None:
    mixed = mixed_of("dgx-h100:2", "dgx-h100:2")
    training = Training(global_batch=64, seq=4096)
    strategy = Strategy(pp=4, ep=8, expert_tp=1, zero=1)
    whole = Job(model=model("mixtral-8x7b"), cluster=cluster_from("dgx-h100:4"), training=training, strategy=strategy)
    own = Arrangement(mixed, (0, 1), whole.with_strategy(stage_layers=(8, 8, 8, 8)))
    assert mixed_step(own).step_seconds == pytest.approx(candidate(whole).step_seconds, rel=1e-9)


def test_stages_inside_a_node_send_over_its_own_network() -> None:
    """One cluster prices all boundaries as its slowest; here only the one between the kinds is: a little faster."""
    training = Training(global_batch=64, seq=4096)
    strategy = Strategy(tp=2, pp=8, stage_layers=(2,) * 8)
    one = Job(model=model("llama3.2-1b"), cluster=cluster_from("dgx-h100:2"), training=training, strategy=strategy)
    step = mixed_step(Arrangement(mixed_of("dgx-h100", "dgx-h100"), (0, 1), one))
    expected = candidate(one).step_seconds
    assert 0.97 * expected < step.step_seconds < expected
    messages = boundary_seconds(step.price.prediction)
    assert isinstance(messages, list)
    assert messages[3] == max(messages) > 2 * min(messages)


def test_a_slower_link_between_the_kinds_costs_time() -> None:
    fast, slow = (mixed_of("dgx-h100:2", "dgx-h100:2", link=link) for link in ("infiniband-ndr", "ethernet-1g"))
    layers = (8, 8, 8, 8)
    seconds = [
        mixed_step(arrangement(mixed, (0, 1), "llama3-8b", 64, tp=8, pp=4, stage_layers=layers)).step_seconds
        for mixed in (fast, slow)
    ]
    assert seconds[1] > 1.05 * seconds[0]


# -- layers to kinds ----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "zbv"])
def test_the_faster_kind_gets_more_layers(schedule: str, order: tuple[int, int]) -> None:
    mixed = mixed_of("dgx-h100:2", "dgx-a100:2")
    interleave = 2 if schedule == "interleaved" else 1
    own = arrangement(mixed, order, "llama3-8b", 128, tp=8, pp=4, schedule=schedule, interleave=interleave)
    step = placed(own)
    layers = {part.kind: sum(part.layers) for part in step.parts}
    assert sum(layers.values()) == 32
    assert layers[0] > 1.4 * layers[1]
    even = own.with_strategy(stage_layers=stage_layer_counts(own.job.model, own.strategy))
    assert step.step_seconds < 0.85 * mixed_step(even).step_seconds


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_kind_with_little_memory_gets_fewer_layers(order: tuple[int, int]) -> None:
    own = arrangement(mixed_of("dgx-h100", "dgx-h100"), order, "llama3-8b", 64, tp=4, pp=4)
    roomy = placed(own)
    little = 0.7 * roomy.memory(0).total / 2**30
    step = placed(replace(own, mixed=mixed_of(with_memory("dgx-h100", little), "dgx-h100")))
    before, layers = ({part.kind: sum(part.layers) for part in one.parts} for one in (roomy, step))
    assert layers[0] < min(layers[1], before[0])
    assert step.memory(0).total <= little * 2**30
    assert step.step_seconds > roomy.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 64])
def test_no_division_is_better(batch: int) -> None:
    """All 165 divisions of 10 layers and two ends over 4 stages, in both orders of the kinds."""
    mixed = mixed_of("dgx-h100", "dgx-a100")
    found, best = [], []
    for order in ((0, 1), (1, 0)):
        own = arrangement(mixed, order, "llama3.2-1b", batch, tp=4, pp=4)
        own = replace(own, job=own.job.unchecked(model=replace(own.job.model, layers=10, published_parameters=None)))
        found.append(placed(own).step_seconds)
        request = MixedRequest(own.job, mixed=mixed)
        for cuts in combinations(range(1, 12), 3):
            counts = [end - start for start, end in zip((0, *cuts), (*cuts, 12))]
            counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
            way = own.with_strategy(stage_layers=tuple(counts))
            if fits_kinds(request, way):
                best.append(mixed_step(way).step_seconds)
    assert len(best) == 2 * 165
    assert min(found) <= 1.01 * min(best)


# -- the plan -----------------------------------------------------------------------------------------


def test_the_plan_is_priced_ranked_and_fits() -> None:
    found = small_plan(mixed_of("dgx-h100", "dgx-a100"))
    assert found.status == "runs"
    for step in found.candidates:
        strategy = step.arrangement.strategy
        assert strategy.tp == 4
        assert strategy.world == 16
        layers = [sum(part.layers) for part in step.parts]
        assert sum(layers) == 16 or layers == [16, 16]  # stages of the kinds, or replicas
        for part in step.parts:
            assert part.strategy.world == part.cluster.devices
            assert part.memory.total <= part.cluster.device.memory
            assert 0 <= part.idle_share < 1
    seconds = [step.seconds_per_token for step in found.candidates]
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[0] <= 1.005 * min(seconds)


@pytest.mark.slow
def test_nothing_in_the_space_is_better() -> None:
    """Every strategy and order of a small space, divided and simulated, against the one that the search took."""
    mixed = mixed_of("dgx-h100", "dgx-a100")
    found = small_plan(mixed, "schedule=1f1b,microbatch=1,recompute=none,zero=0..1")
    every = []
    for one in MixedSpace(found.request).arrangements():
        zero = 1 if one.strategy.gradient_group > 1 else 0
        every.append(placed(one.with_strategy(zero=zero)).seconds_per_token)
    assert len(every) == 20
    assert found.best.seconds_per_token <= 1.01 * min(every)


@pytest.mark.slow
def test_mixing_is_compared_with_each_kind_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = small_plan(mixed_of("dgx-h100", "dgx-a100"), alone=True)
    assert [one is not None for one in found.alone] == [True, True]
    assert found.best_alone is found.alone[0]
    assert found.gain is not None
    assert 1 < found.gain < 2
    mixed_page(found).print()
    text = capsys.readouterr().out
    assert "priced only" not in text
    assert "times the better kind alone" in text
    assert max(map(len, text.splitlines())) < 150
    data = json.loads(json.dumps(mixed_data(found)))
    assert data["status"] == "runs"
    assert Job.from_dict(data["job"]) == found.best.job
    assert data["candidates"][0]["kinds"][0]["cluster"].startswith("dgx-")


def test_a_model_that_no_kind_holds_alone(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [with_memory(name, 14) for name in ("dgx-h100", "dgx-a100")]
    constraints = Constraints(
        parse_constraints("tp=8,schedule=1f1b,microbatch=1,zero=0..1,recompute=none,offload=none")
    )
    training = Training(global_batch=16, seq=2048)
    found = plan_mixed(asked("llama3-8b", mixed_of(*kinds), training, constraints=constraints))
    assert found.alone == (None, None)
    assert found.gain is None
    mixed_page(found).print()
    assert "no kind holds the model alone\n" in capsys.readouterr().out


def test_three_kinds() -> None:
    found = small_plan(mixed_of("dgx-h100", "dgx-a100", "dgx-v100"), "tp=8,pp=3,schedule=1f1b,microbatch=1")
    layers = {part.cluster.name: sum(part.layers) for part in found.best.parts}
    assert layers["dgx-h100"] > layers["dgx-a100"] > layers["dgx-v100"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed": "offload=optimizer"}, "offload: is not varied on a mixed cluster; leave it out: it is none"),
        ({"fixed": "stage_layers=even"}, "follow from the kinds"),
        ({"fixed": "pp=7"}, "no tp·cp·dp divides 8 and 8 devices"),
        ({"memory_bytes": 2 * 2**30}, "no strategy across the kinds fits in 2.00 GiB per h100-sxm"),
    ],
)
def test_what_cannot_be_planned_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        small_plan(mixed_of("dgx-h100", "dgx-a100"), **change)
    assert message in str(caught.value)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_batch_of_fewer_sequences_than_replicas(batch: int) -> None:
    """It has a plan, of layouts that it can be divided over."""
    constraints = Constraints(parse_constraints("schedule=1f1b,microbatch=1,recompute=none,pp=2"))
    training = Training(global_batch=batch, seq=512)
    found = plan_mixed(asked("llama3.2-1b", mixed_of("dgx-h100", "dgx-a100"), training, constraints=constraints))
    assert found.best.arrangement.job.microbatches >= 1


def test_a_batch_is_needed() -> None:
    with pytest.raises(SpecError, match="global_batch: is missing"):
        asked("llama3.2-1b", mixed_of("dgx-h100", "dgx-a100"), Training(seq=4096))
