"""A table of strategies prices each of them as `predict` and `peak_memory` do, and as a table of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies

from cost.jobs import valid_jobs
from effort import examples
from shardwise.accuracy.vocabulary import cut
from shardwise.cost.memory.device import device_memories, peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.cost.sweep.columns import Group, LayerChoice, RecomputeChoice, ScheduleChoice, ShardChoice
from shardwise.cost.sweep.price import TablePricer
from shardwise.layout.stages import rank_contents, rank_kinds
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import trained_parameters
from shardwise.spec.stack import stack_from
from shardwise.spec.strategy import Offload
from shardwise.spec.training import Training


def group_of(job: Job) -> Group:
    """The table of one strategy."""
    strategy = job.strategy
    kinds = rank_kinds(job, range(strategy.pp))
    base = replace(
        strategy,
        zero=strategy.zero if job.stack.autocast or job.stack.module_hooks else 0,
        shard_group=None,
        keep_parameters=False,
        accumulate="sharded",
        offload=Offload(),
        schedule="dualpipe" if strategy.schedule == "dualpipe" else "1f1b",
        interleave=1,
        stage_layers="balanced",
        recompute="none",
        recompute_layers=None,
    )
    column = ShardChoice(strategy.zero, strategy.shard_group, strategy.keep_parameters, strategy.accumulate)
    return Group(
        base,
        (LayerChoice(strategy.sequence_parallel, strategy.context_method, strategy.microbatch),),
        (ScheduleChoice(strategy.schedule, strategy.interleave, strategy.stage_layers),),
        (RecomputeChoice(strategy.recompute, strategy.recompute_layers),),
        (column,),
        (strategy.offload,),
        tuple(kinds),
        tuple(kinds.values()),
        ((job.sequences,),),
    )


def table_of(job: Job) -> tuple[float, float, float]:
    """Step seconds, device bytes and host bytes by a table of one row and one column."""
    (piece,) = TablePricer(job).pieces([group_of(job)])
    assert piece.strategy(0, 0) == job.strategy
    return float(piece.step_seconds().item()), float(piece.memory_bytes.item()), float(np.max(piece.host_bytes))


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(valid_jobs())
def test_a_table_of_one_equals_the_job(job: Job) -> None:
    seconds, memory, host = table_of(job)
    assert seconds == pytest.approx(predict(job).step_seconds, rel=1e-9)
    assert memory == pytest.approx(peak_memory(job).total, rel=1e-14)  # one sum: only the order of its terms differs
    assert host == pytest.approx(max(one.host for one in device_memories(job)), rel=1e-14)


TUNINGS: tuple[dict[str, Any], ...] = (
    {"adapters": {}},
    {"adapters": {"targets": ["attention"], "layers": [0]}, "base_precision": "nf4"},
    {"adapters": {"method": "dora", "dropout": 0.1}, "trained": ["norms"], "base_precision": "int8"},
    {"trained": ["head"]},
    {"trained": ["layers.0", "embedding"]},
    {"task": "dpo"},
    {"lengths": {"mean": 100, "longest": 900}},
    {"lengths": {"mean": 100, "longest": 900, "packing": "padded"}, "adapters": {}},
    {"task": "dpo", "adapters": {}, "base_precision": "bf16"},
)


@settings(max_examples=examples(100), deadline=None)
@given(valid_jobs(), strategies.sampled_from(TUNINGS), strategies.booleans())
def test_what_is_tuned_too(job: Job, tuning: dict[str, Any], of_experts: bool) -> None:
    fields = job.training.to_dict() | tuning
    if of_experts and job.model.moe and "adapters" in fields:
        fields["adapters"] = {**fields["adapters"], "experts": True}
    try:
        job = replace(job, training=Training.from_dict(fields))
    except SpecError:
        assume(False)
    seconds, memory, host = table_of(job)
    assert seconds == pytest.approx(predict(job).step_seconds, rel=1e-9)
    assert memory == pytest.approx(peak_memory(job).total, rel=1e-13)
    assert host == pytest.approx(max(device.host for device in device_memories(job)), rel=1e-13)


PARTS = ("", ".attention", ".mlp", ".experts", ".norms", ".router")


@settings(max_examples=examples(200), deadline=None)
@given(valid_jobs(), strategies.data())
def test_stages_whose_layers_are_tuned_unlike(job: Job, data: strategies.DataObject) -> None:
    layer = strategies.integers(0, job.model.layers - 1)
    pattern = strategies.tuples(layer, layer, strategies.sampled_from(PARTS)).map(
        lambda drawn: f"layers.{min(drawn[:2])}-{max(drawn[:2])}{drawn[2]}"
    )
    trained = data.draw(strategies.lists(pattern, max_size=2))
    adapted = data.draw(strategies.sets(layer, max_size=4))
    tuning = {"trained": trained} | ({"adapters": {"layers": sorted(adapted)}} if adapted else {})
    try:
        job = replace(job, training=Training.from_dict(job.training.to_dict() | tuning))
    except SpecError:
        assume(False)
    assume(job.training.freezes)
    seconds, memory, _ = table_of(job)
    assert seconds == pytest.approx(predict(job).step_seconds, rel=1e-9)
    assert memory == pytest.approx(peak_memory(job).total, rel=1e-13)
    held = [rank_contents(job, rank) for rank in range(job.strategy.pp)]
    if (
        job.strategy.tp * job.strategy.ep * job.strategy.expert_tensor_parallel == 1
        and job.strategy.schedule != "dualpipe"
    ):
        assert sum(one.total for one in held) == pytest.approx(trained_parameters(job.model, job.training.tuning))


@settings(max_examples=examples(100), deadline=None)
@given(valid_jobs(), strategies.sampled_from(("torchtitan", "megatron-bridge", "owned")), strategies.booleans())
def test_seconds_of_other_software_too(job: Job, stack: str, on_nodes: bool) -> None:
    """Gathers and reductions in turn, buckets that grow with the ranks, weights that have an owner each."""
    known = stack_from("pytorch" if stack == "owned" else stack)
    known = known.changed(
        owned_parameters=stack == "owned", bucket_per_rank=min(3000, known.bucket_per_rank), adamw="foreach"
    )
    cluster = replace(job.cluster, library="nccl") if on_nodes else job.cluster
    job = replace(job, stack=known, cluster=cluster)
    assert table_of(job)[0] == pytest.approx(predict(job).step_seconds, rel=1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(
    valid_jobs(),
    strategies.sampled_from(
        (
            "torchtitan",
            "accelerate",
            "megatron-core",
            "nanotron",
            "megatron-tests",
            "deepspeed",
            "deepspeed-changed",
            "maxtext",
            "deepspeed@2021",
            "pytorch-changed",
        )
    ),
)
def test_memory_of_other_software_too(job: Job, stack: str) -> None:
    """Message buffers for each microbatch, whole gradients, copies of gradients: what other frameworks keep."""
    known = stack_from(stack.removesuffix("-changed"))
    if stack.endswith("-changed"):
        known = known.changed(update_elements=5000, kept_router_losses=True, experts="padded")
    job = replace(job, stack=known)
    assert table_of(job)[1] == pytest.approx(peak_memory(job).total, rel=1e-14)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("units", ["own", "shared"])
def test_time_of_adapters_in_units_of_their_own(units: Any, zero: int) -> None:
    training = {"seq": 512, "global_batch": 8, "adapters": {}, "base_precision": "nf4"}
    strategy = {"dp": 4, "microbatch": 2, "zero": zero, "recompute": "full"}
    cluster = cut(cluster_from("dgx-a100"), 4, 4)
    fields = {"model": "mistral-7b", "cluster": cluster, "strategy": strategy, "training": training}
    job = Job.from_dict({**fields, "stack": "accelerate@0.34"})
    job = replace(job, stack=replace(job.stack, adapter_units=units))
    assert table_of(job)[0] == pytest.approx(predict(job).step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    "stack",
    [{"hooked_inputs": True}, {"loads_whole": True}, {"upcast_base": True}, {"flat_parameters": "mixed"},
     {"quantised_inputs": "kept over losses"}, {"joined_projections": True}, {"dequantised_by": "operators"}, {}],
    ids=lambda stack: next(iter(stack), "plain"),
)  # fmt: skip
@pytest.mark.parametrize(("recompute", "devices"), [("full", 2), ("none", 2), ("full", 1)])
def test_memory_of_frozen_weights_too(stack: dict[str, Any], recompute: str, devices: int) -> None:
    training = {"seq": 2048, "global_batch": 2 * devices, "adapters": {}, "base_precision": "nf4"}
    strategy = {"dp": devices, "microbatch": 2, "zero": 3 if devices > 1 else 0, "recompute": recompute}
    cluster = cut(cluster_from("dgx-a100"), devices, devices)
    fields = {"model": "mistral-7b", "cluster": cluster, "strategy": strategy, "training": training}
    job = Job.from_dict({**fields, "stack": "accelerate@0.34"})
    job = replace(job, stack=replace(job.stack, **{"hooked_inputs": False, "loss": "pieces", **stack}))
    assert table_of(job)[1] == pytest.approx(peak_memory(job).total, rel=1e-9)
