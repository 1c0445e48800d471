"""What communication hides under: properties over random valid jobs, and small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cost.builders import LLAMA, job, switched
from cost.jobs import valid_jobs, with_faster_level
from effort import examples
from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.analysis import analyze
from shardwise.cost.step.prediction import RankFloor, predict, rank_floors, stage_compute
from shardwise.cost.traffic.execution import step_traffic
from shardwise.cost.traffic.traffic import IN_LAYER, ComputeWindows, Traffic, priced, with_exposed_seconds
from shardwise.layout.payloads import Payload, Phase, Role
from shardwise.layout.stages import rank_contents
from shardwise.spec.job import Job

PROPERTY = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
SLACK = 1 + 1e-9


def exposed_of_rank(case: Job, rank: int) -> list[Traffic]:
    contents = rank_contents(case, rank)
    windows = stage_compute(case, contents).windows(case.microbatches)
    return with_exposed_seconds(step_traffic(case, contents), windows)


def at_peak(case: Job) -> RankFloor:
    """The rank that takes longest by itself."""
    return max(rank_floors(predict(case)), key=lambda rank: rank.step_seconds(0.0))


def exposed_at_peak(case: Job) -> float:
    return sum(traffic.exposed_seconds for traffic in at_peak(case).traffics)


def floor_seconds(case: Job) -> float:
    return analyze(case).floor_seconds


@PROPERTY
@given(valid_jobs())
def test_exposed_and_hidden_add_up_to_the_whole(case: Job) -> None:
    for traffic in at_peak(case).traffics:
        assert traffic.exposed_seconds >= 0
        if traffic.fixed_exposed_seconds is None:
            assert traffic.exposed_seconds + traffic.hidden_seconds == pytest.approx(traffic.seconds)
        if traffic.window == "none" and traffic.fixed_exposed_seconds is None:
            assert traffic.hidden_seconds == 0


@PROPERTY
@given(valid_jobs())
def test_shares_lie_between_zero_and_one(case: Job) -> None:
    analysis = analyze(case)
    assert 0 <= analysis.exposed_share < 1
    assert 0 < analysis.mfu < analysis.mfu_ceiling <= SLACK
    assert analysis.floor_seconds < analysis.predicted_seconds
    assert sum(analysis.exposed_by_dimension().values()) == pytest.approx(analysis.exposed_seconds)


@PROPERTY
@given(valid_jobs())
def test_the_parts_of_the_predicted_step_add_up_and_none_is_below_zero(case: Job) -> None:
    analysis = analyze(case)
    assert sum(analysis.parts.values()) == pytest.approx(analysis.predicted_seconds)
    assert min(analysis.parts.values()) >= -1e-9 * analysis.predicted_seconds
    for name, seconds in analysis.exposed_by_dimension().items():
        traffics = analysis.dimension_traffics(name)
        assert sum(traffic.added_seconds for traffic in traffics) == pytest.approx(seconds)


@PROPERTY
@given(valid_jobs())
def test_windows_are_never_over_committed(case: Job) -> None:
    """Layers' own transfers fit under the pass; of those that span layers, each link has the pass only once."""
    floor = at_peak(case)
    windows = floor.compute.windows(case.microbatches)
    for which, seconds in (("forward", windows.forward), ("backward", windows.backward)):
        of_pass = [t for t in floor.traffics if t.in_pass == which and t.fixed_exposed_seconds is None]
        layers = [t for t in of_pass if t.dimension in IN_LAYER]
        assert sum(t.hidden_seconds for t in layers) <= seconds * SLACK
        lasting = seconds + sum(t.exposed_seconds for t in layers)
        across = [t for t in of_pass if t.dimension not in IN_LAYER and t.seconds and t.window_share <= 1]
        waited = sum(t.exposed_seconds for t in across)  # by all links together
        for link in {name for t in across for name in t.level_seconds}:
            hidden = [max(0.0, t.level_seconds.get(link, 0.0) - t.exposed_seconds) for t in across]
            busy = sum(t.level_seconds.get(link, 0.0) for t in layers)
            assert sum(hidden) <= (max(0.0, lasting - busy) + waited) * SLACK
        # Gradients that are complete at the end only have the last microbatches to hide under.
        for last in (t for t in across if t.window_share < 1):
            assert last.hidden_seconds <= (last.window_share * lasting + waited) * SLACK
    attention = [t for t in floor.traffics if t.window == "attention forward"]
    assert sum(t.hidden_seconds for t in attention) <= windows.attention_forward * SLACK


@PROPERTY
@given(valid_jobs(), st.data())
def test_a_faster_level_never_costs_time(case: Job, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(case.cluster.levels) - 1))
    faster = with_faster_level(case, index)
    for rank in (0, case.strategy.pp - 1):
        before, after = exposed_of_rank(case, rank), exposed_of_rank(faster, rank)
        for slow, quick in zip(before, after, strict=True):
            assert quick.seconds <= slow.seconds * SLACK
        assert sum(t.exposed_seconds for t in after) <= sum(t.exposed_seconds for t in before) * SLACK
    assert floor_seconds(faster) <= floor_seconds(case) * SLACK


@PROPERTY
@given(valid_jobs(), st.sampled_from(("dp", "tp", "pp", "cp", "ep", "offload")))
def test_more_overlap_never_exposes_more(case: Job, dimension: str) -> None:
    apart, together = (
        replace(case, strategy=replace(case.strategy, overlap=replace(case.strategy.overlap, **{dimension: flag})))
        for flag in (False, True)
    )
    assert exposed_at_peak(together) <= exposed_at_peak(apart) * SLACK


@PROPERTY
@given(valid_jobs())
def test_twice_the_batch_takes_longer_but_at_most_twice_as_long(case: Job) -> None:
    once = floor_seconds(case)
    twice = floor_seconds(replace(case, training=replace(case.training, global_batch=2 * case.sequences)))
    assert once <= twice * SLACK
    assert twice <= 2 * once * SLACK


@PROPERTY
@given(valid_jobs())
def test_a_faster_device_never_costs_time(case: Job) -> None:
    device = case.cluster.device
    faster = replace(device, peak={name: 2 * peak for name, peak in device.peak.items()})
    quick = floor_seconds(replace(case, cluster=replace(case.cluster, device=faster)))
    assert quick <= floor_seconds(case) * SLACK


# -- by hand ---------------------------------------------------------------------------------------------


def traffic(seconds: float, window: str, share: float = 1.0, unhideable: float = 0.0) -> Traffic:
    """One message that takes ``seconds``."""
    link = Topology.switch(2, 1.0)
    dimension = "cp" if window.startswith("attention") else "dp"
    payload = Payload(Role.GRADIENTS, Phase.FORWARD if window in ("forward", "attention forward") else Phase.BACKWARD)
    return priced(dimension, payload, CollectiveKind.SEND_RECV, seconds, 1, link, "auto", window=window,
                  window_share=share, last_only=share < 1, unhideable=unhideable)  # fmt: skip


WINDOWS = ComputeWindows(forward=10, backward=20, attention_forward=4, attention_backward=8)


def exposed(*traffics: Traffic) -> list[float]:
    return [t.exposed_seconds for t in with_exposed_seconds(list(traffics), WINDOWS)]


def test_what_fits_hides_and_the_rest_shows() -> None:
    assert exposed(traffic(7, "forward"), traffic(7, "forward"), traffic(7, "backward")) == [0, 4, 0]


def test_the_unhideable_part_shows() -> None:
    assert exposed(traffic(8, "forward", unhideable=0.25)) == [2]


def test_ring_attention_hides_under_attention_only() -> None:
    assert exposed(traffic(6, "attention forward"), traffic(10, "forward")) == [2, 4]


def test_two_reductions_share_the_last_microbatch() -> None:
    """Dense and expert gradients both have only a quarter of the backward pass, 5 s, between them."""
    assert exposed(traffic(4, "backward", 1 / 4), traffic(4, "backward", 1 / 4)) == [0, 3]


def test_the_last_microbatch_is_partly_taken() -> None:
    """12 of 20 s are taken evenly: of the last quarter 5 − 3 = 2 s are left."""
    assert exposed(traffic(12, "backward"), traffic(4, "backward", 1 / 4)) == [0, 2]


def test_more_computation_to_hide_under_never_shortens_the_step() -> None:
    """Two reductions of 7 s that keep one link busy for 5 s: whichever waits for its latency, the other may send."""
    link, payload = Topology.switch(2, 1.0, 2.0), Payload(Role.GRADIENTS, Phase.BACKWARD)
    one = priced("dp", payload, CollectiveKind.SEND_RECV, 5.0, 1, link, "auto", window="backward")
    steps = [
        backward + sum(t.exposed_seconds for t in with_exposed_seconds([one, one], ComputeWindows(0, backward, 0, 0)))
        for backward in range(15)
    ]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(10)


def test_gradients_wait_for_the_last_microbatch_unless_every_one_is_reduced() -> None:
    cluster = switched(8, bandwidths=(2e9,))

    def exposed_share(batch: int) -> float:
        floor = at_peak(job(LLAMA, cluster, dp=8, training={"global_batch": batch}))
        return sum(t.exposed_seconds for t in floor.traffics) / sum(t.seconds for t in floor.traffics)

    assert exposed_share(8) == pytest.approx(exposed_share(64))


def test_without_overlap_everything_shows_but_what_runs_beside_its_product() -> None:
    """The sum of a product's input gradients runs beside its weight gradient, which here lasts longer or less long."""
    hidden = []
    for peak in (1e9, 1e15):
        case = job(LLAMA, dp=4, tp=2, zero=1, overlap={"dp": False}, sequence_parallel=False)
        device = replace(case.cluster.device, peak={"bf16": peak, "fp32": peak})
        floor = at_peak(replace(case, cluster=replace(case.cluster, device=device)))
        beside = [t for t in floor.traffics if t.what == "input gradients, backward"]
        others = [t for t in floor.traffics if t not in beside]
        assert sum(t.hidden_seconds for t in others) == pytest.approx(0)
        hidden.append(sum(t.hidden_seconds for t in beside) / sum(t.seconds for t in beside))
    assert hidden[0] == pytest.approx(1)
    assert 0 < hidden[1] < 0.1
