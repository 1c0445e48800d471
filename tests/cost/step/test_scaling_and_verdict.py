"""Scaling tables, storage, the sentence that names the bottleneck, and the change it proposes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cost.builders import GIB, GPT, LLAMA, MOE, job, switched
from cost.jobs import valid_jobs
from effort import examples
from shardwise.cost.analysis import Analysis, analyze
from shardwise.cost.campaign import checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.step.scaling import scaling_table
from shardwise.cost.step.verdict import best_change, bottleneck
from shardwise.planner.candidate import candidate
from shardwise.report.verdict import bottleneck_sentence
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.support import verdict

PROPERTY = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


def scaled_job() -> Job:
    return job("llama3-8b", "dgx-h100:8", tp=8, dp=8, zero=1, training={"seq": 8192, "global_batch": 64})


def test_strong_scaling_keeps_the_batch() -> None:
    """Efficiency T1/(N·TN), N the growth over the smallest size."""
    rows = scaling_table(scaled_job(), "strong")
    assert [row.devices for row in rows] == [16, 32, 64, 128, 256, 512]
    assert {row.sequences for row in rows} == {64}
    for row in rows:
        growth = row.devices / rows[0].devices
        assert row.efficiency == pytest.approx(rows[0].predicted_seconds / (growth * row.predicted_seconds))
    assert rows[-1].efficiency < rows[0].efficiency == 1


def test_weak_scaling_grows_the_batch() -> None:
    """Efficiency T1/TN."""
    rows = scaling_table(scaled_job(), "weak")
    assert [row.sequences / row.devices for row in rows] == [1.0] * 6
    for row in rows:
        assert row.efficiency == pytest.approx(rows[0].predicted_seconds / row.predicted_seconds)
        assert row.tokens_per_second == pytest.approx(row.sequences * 8192 / row.predicted_seconds)


def test_perfect_scaling_without_communication_or_bubble() -> None:
    """Data parallelism over a network and a memory so fast that they cost nothing: efficiency 1 both ways."""
    cluster = switched(8, 4, bandwidths=(1e30, 1e30))
    efficiency = replace(cluster.device.efficiency, step_seconds=0.0, device_spread=0.0)  # nor what comes once a step
    device = replace(cluster.device, memory_bandwidth=1e30, efficiency=efficiency)
    case = job(LLAMA, replace(cluster, device=device), dp=32, training={"global_batch": 1024})
    for kind in ("strong", "weak"):
        assert [row.efficiency for row in scaling_table(case, kind)] == pytest.approx([1.0] * 6)


def test_the_table_is_of_the_predicted_step() -> None:
    """What every step costs besides does not shrink: the floor, which has no such thing, would hide that."""
    for kind in ("strong", "weak"):
        for row in scaling_table(scaled_job(), kind):
            batch = 64 if kind == "strong" else row.devices
            training = {"seq": 8192, "global_batch": batch}
            same = job(
                "llama3-8b", f"dgx-h100:{row.devices // 8}", tp=8, dp=row.data_parallel, zero=1, training=training
            )
            assert row.predicted_seconds == candidate(same).step_seconds > analyze(same).floor_seconds


def test_sizes_that_cannot_be_are_left_out() -> None:
    case = job(LLAMA, switched(8), dp=8, training={"global_batch": 16})
    assert [row.devices for row in scaling_table(case, "strong")] == [2, 4, 8]


@PROPERTY
@given(valid_jobs())
def test_every_job_has_a_table_with_itself_in_it(case: Job) -> None:
    for kind in ("strong", "weak"):
        rows = scaling_table(case, kind)
        assert 16 in [row.devices for row in rows]
        assert all(row.efficiency > 0 for row in rows)


# -- storage ---------------------------------------------------------------------------------------------


def stored(cluster_nodes: int, **fields: Any) -> Any:
    storage = {"name": "disk", "link": {"bandwidth": 2e9, "latency": 0.5}, **fields}
    return switched(8, cluster_nodes, storage=[storage])


def test_checkpoint_holds_weights_master_weights_and_moments() -> None:
    analysis = analyze(job(LLAMA, dp=1))
    assert checkpoint_bytes(analysis) == parameter_count(LLAMA) * (2 + 4 + 8)
    single = analyze(job(LLAMA, dp=1, training={"precision": "fp32", "optimizer": "sgd"}))
    assert checkpoint_bytes(single) == parameter_count(LLAMA) * 4


def test_checkpoint_of_muon_keeps_two_moments_for_the_ends() -> None:
    analysis = analyze(job(LLAMA, dp=1, training={"optimizer": "muon"}))
    ends = 2 * 512 * 64 + 64
    assert checkpoint_bytes(analysis) == (parameter_count(LLAMA) - ends) * (6 + 4) + ends * (6 + 8)


def test_storage_seconds() -> None:
    """Every node writes its part at 2 GB/s; a shared system stops at its total."""
    size = parameter_count(LLAMA) * 14
    for cluster, rate in (
        (stored(4), 8e9),
        (stored(4, total=3e9, shared=True), 3e9),
        (stored(4, count_per_node=2), 16e9),
    ):
        analysis = analyze(job(LLAMA, cluster, dp=32))
        (cost,) = storage_costs(analysis)
        assert cost.bandwidth == rate
        assert cost.write_seconds == cost.read_seconds == pytest.approx(size / rate + 0.5)
        assert cost.data_rate_share == pytest.approx(analysis.tokens_per_second * 4 / rate)
        assert data_rate(analysis) == pytest.approx(4 * analysis.tokens_per_second)


# -- verdict ---------------------------------------------------------------------------------------------

SLOW = 1e6


def slow(*sizes: int, **fields: Any) -> Cluster:
    return switched(*sizes, bandwidths=(SLOW,) * 3, **fields)


def slow_memory(bandwidth: float) -> Cluster:
    cluster = switched(1)
    return replace(cluster, device=replace(cluster.device, memory_bandwidth=bandwidth))


BOTTLENECKS: dict[str, Job] = {
    "arithmetic": job("llama3-8b", "dgx-h100:1", tp=8, training={"seq": 8192, "global_batch": 8}),
    "memory-bound operators": job(LLAMA, slow_memory(1e8), dp=1, training={"global_batch": 16}),
    "kernel launches": job(LLAMA, dp=1),
    "the optimizer": job(LLAMA, slow_memory(1e7), dp=1, training={"seq": 16}),
    "tensor-parallel": job(LLAMA, slow(8), dp=1, tp=8, training={"seq": 1024}),
    "context-parallel": job(LLAMA, slow(2), dp=1, cp=2, zero=0, training={"global_batch": 64}),
    "expert-parallel": job(MOE, slow(8), dp=8, ep=8, training={"global_batch": 512}),
    "pipeline-parallel": job(LLAMA, slow(4), dp=1, pp=4, training={"global_batch": 8}),
    "the pipeline bubble": job(LLAMA, dp=1, pp=8, training={"seq": 65536}),
    "data-parallel": job(LLAMA, slow(8), dp=8),
    "offload": job(LLAMA, slow(1, host_link={"bandwidth": SLOW, "latency": 0}), dp=1, offload={"optimizer": 1}),
}


def sentence_of(analysis: Analysis) -> str:
    return bottleneck_sentence(analysis, bottleneck(analysis))


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_every_part_can_be_the_bottleneck(name: str) -> None:
    sentence = sentence_of(analyze(BOTTLENECKS[name]))
    assert sentence.startswith(f"Bound by {name}"), sentence


def test_the_sentence_names_the_network_level() -> None:
    sentence = sentence_of(analyze(job(LLAMA, slow(4, 2), dp=8)))
    assert "over level" in sentence


def small_memory(**fields: Any) -> Cluster:
    cluster = switched(8)
    device = {**cluster.device.to_dict(), "memory": 2**20, **fields}
    return Cluster.from_dict({**cluster.to_dict(), "device": device})


@pytest.mark.parametrize(
    ("part", "strategy", "training"),
    [
        ("optimizer", {"dp": 8}, {}),
        ("gradients", {"dp": 8, "zero": 1}, {"precision": "bf16-fp32-grads", "seq": 16}),
        ("activations", {"dp": 8, "zero": 3}, {"seq": 4096}),
    ],
)
def test_what_does_not_fit_is_said_first(part: str, strategy: dict[str, Any], training: dict[str, Any]) -> None:
    model = replace(GPT, max_seq=4096)
    analysis = analyze(job(model, small_memory(), training, **strategy))
    assert analysis.fit == "does not fit"
    sentence = sentence_of(analysis)
    assert sentence.startswith("Does not fit")
    assert f"largest part is {part}" in sentence


def test_best_change_of_a_network_bound_job() -> None:
    fields = {"tp": 8, "pp": 4, "dp": 16, "zero": 1}
    analysis = analyze(job("llama3-70b", "dgx-h100:64", training={"seq": 8192, "global_batch": 1024}, **fields))
    change = best_change(analysis)
    assert change is not None
    assert change.predicted_seconds < analysis.predicted_seconds


@PROPERTY
@given(valid_jobs())
def test_what_is_advised_is_quicker_by_the_prediction_fits_and_runs_as_the_job_does(case: Job) -> None:
    analysis = analyze(case)
    change = best_change(analysis)
    if change is None:
        return
    other = analyze(change.job)
    assert other.predicted_seconds == change.predicted_seconds < 0.99 * analysis.predicted_seconds
    assert other.fit == "fits" or other.fit == analysis.fit
    assert verdict(change.job).status == verdict(case).status


def test_offload_needs_room_on_the_host() -> None:
    fields = {"host_link": {"bandwidth": 1e9, "latency": 0}}
    small, large = (
        analyze(job("llama3-8b", switched(8, host_memory=memory, **fields), dp=8, zero=1, offload={"optimizer": 1}))
        for memory in (64 * GIB, 128 * GIB)
    )
    assert small.host_bytes == pytest.approx(12 * 8_030_261_248)  # 8 devices, an eighth each
    assert small.fit == "does not fit"
    assert sentence_of(small) == "Does not fit: offload needs 89.7 GiB of host memory per node, which has 64.0 GiB."
    assert large.fit == "fits"


def test_a_device_without_measurements_is_said() -> None:
    assert any("generic efficiencies" in note for note in analyze(job(LLAMA, dp=1)).notes)
    assert analyze(job("llama3-8b", "dgx-h100:1", tp=8)).notes == ()
