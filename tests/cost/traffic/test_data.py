"""Bytes that data parallelism sends in a step, derived by hand for rings on one switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost.builders import (
    LLAMA,
    MOE,
    job,
    ring,
    sent,
    switched,
    traffics,
)
from shardwise import predict
from shardwise.collectives import CollectiveKind
from shardwise.cost.analysis import Analysis
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.cost.traffic.data import data_traffic
from shardwise.cost.traffic.traffic import ComputeWindows, collective_price, with_exposed_seconds
from shardwise.layout.network import network
from shardwise.layout.payloads import Share
from shardwise.layout.stages import rank_contents
from shardwise.spec import presets
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.stack import Stack, stack_from


def test_data_parallel_all_reduce() -> None:
    """2(n−1)/n·P·e, once per step whatever the number of microbatches."""
    gradients = 2 * parameter_count(LLAMA)
    for batch in (8, 64):
        case = ring(LLAMA, dp=8, training={"global_batch": batch})
        assert sent(traffics(case, "dp")) == pytest.approx(2 * 7 / 8 * gradients)


def test_fp32_gradients_double_the_bytes() -> None:
    half, whole = (
        sent(traffics(ring(LLAMA, dp=8, training={"precision": precision}), "dp"))
        for precision in ("bf16", "bf16-fp32-grads")
    )
    assert whole == 2 * half


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_send_the_bytes_of_one_all_reduce(zero: int) -> None:
    plain, sharded = (sent(traffics(ring(LLAMA, dp=8, zero=stage), "dp")) for stage in (0, zero))
    assert sharded == pytest.approx(plain)
    kinds = {traffic.kind for traffic in traffics(ring(LLAMA, dp=8, zero=zero), "dp")}
    assert kinds == {CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER}  # the full gradient is never gathered


def test_zero_3_sends_half_as_much_again_and_gathers_every_microbatch() -> None:
    one_pass = 7 / 8 * 2 * parameter_count(LLAMA)
    single = ring(LLAMA, dp=8, zero=3)
    assert sent(traffics(single, "dp")) == pytest.approx(3 * one_pass)
    accumulated = ring(LLAMA, dp=8, zero=3, accumulate="local", training={"global_batch": 32})
    assert sent(traffics(accumulated, "dp")) == pytest.approx((2 * 4 + 1) * one_pass)
    kept = ring(LLAMA, dp=8, zero=3, accumulate="local", keep_parameters=True, training={"global_batch": 32})
    assert sent(traffics(kept, "dp")) == pytest.approx(2 * one_pass)


def test_sharded_accumulation_reduces_every_microbatch() -> None:
    one_pass = 7 / 8 * 2 * parameter_count(LLAMA)
    case = ring(LLAMA, dp=8, zero=2, training={"global_batch": 32})
    assert sent(traffics(case, "dp")) == pytest.approx((4 + 1) * one_pass)


def test_hybrid_sharding_shards_inside_and_all_reduces_its_share_across() -> None:
    case = ring(LLAMA, cluster=switched(4, 2), dp=8, zero=3, shard_group=4)
    found, size = traffics(case, "dp"), 2 * parameter_count(LLAMA)
    inside = [t for t in found if t.kind is not CollectiveKind.ALL_REDUCE]
    across = [t for t in found if t.kind is CollectiveKind.ALL_REDUCE]
    assert {t.network for t in inside} == {"level 0 4"}
    assert {t.network for t in across} == {"level 1 2"}
    assert sent(inside) == pytest.approx(3 * 3 / 4 * size)
    assert sent(across) == pytest.approx(2 * 1 / 2 * size / 4)


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    case = ring(LLAMA, dp=2, cp=4)
    assert sent(traffics(case, "dp")) == pytest.approx(2 * 7 / 8 * 2 * parameter_count(LLAMA))


def test_experts_reduce_over_the_ranks_that_hold_them() -> None:
    case = ring(MOE, dp=8, ep=4)
    contents = rank_contents(case, 0)
    dense, experts = (
        sent([t for t in traffics(case, "dp") if (t.payload.share is Share.EXPERTS) == flag]) for flag in (False, True)
    )
    assert dense == pytest.approx(2 * 7 / 8 * 2 * contents.dense)
    assert experts == pytest.approx(2 * 1 / 2 * 2 * contents.experts)
    alone = traffics(ring(MOE, dp=8, ep=8), "dp")
    assert not [t for t in alone if t.payload.share is Share.EXPERTS]


def test_zero_3_gathers_experts_over_their_own_group() -> None:
    case = ring(MOE, dp=8, ep=4, zero=3)
    experts = [t for t in traffics(case, "dp") if t.payload.share is Share.EXPERTS]
    assert sent(experts) == pytest.approx(3 * 1 / 2 * 2 * rank_contents(case, 0).experts)


def test_undivided_gradients_are_summed_in_every_microbatch_only_if_they_leave_the_device() -> None:
    """As `engine/data/fsdp.py` decides by the same rule, `Sharding.reduced_to_shards`."""

    def times(offloaded: float) -> float:
        strategy = {"pp": 2, "dp": 8, "ep": 4, "zero": 3, "shard_group": 2, "accumulate": "sharded",
                    "offload": {"gradients": offloaded, "optimizer": offloaded}}  # fmt: skip
        case = Job.from_dict({"model": "mixtral-8x7b", "cluster": "dgx-h100:2", "strategy": strategy,
                              "training": {"global_batch": 64, "seq": 1024}})  # fmt: skip
        layers = rank_contents(case, 0).moe_layers
        reduced = [t for t in traffics(case, "dp") if t.kind is CollectiveKind.ALL_REDUCE]
        return sum(t.count for t in reduced if t.payload.share is Share.EXPERTS) / layers

    assert (times(0.0), times(1.0)) == (1, 8)


@pytest.mark.quick(6)
@pytest.mark.parametrize("stack", presets.names("stack"))
def test_zero_2_under_a_pipeline_reduces_as_its_stack_does(stack: str) -> None:
    """Once a step with whole gradients in memory, unless stack or strategy say otherwise; a job file keeps which."""

    def priced(**strategy: Any) -> Analysis:
        asked = {"pp": 2, "dp": 4, **strategy}
        found = predict(model="llama3.2-1b", cluster="dgx-h100:1", stack=stack, strategy=asked, global_batch=32).job
        written = Job.from_yaml(found.to_yaml())
        assert written == found == predict(written).job
        return analyze_job(written)

    one, usual, sharded = (priced(zero=2, **more) for more in ({}, {"accumulate": "local"}, {"accumulate": "sharded"}))
    assert stack_from(stack).pipeline_gradients != "sharded"
    assert one.job == usual.job
    bytes_of = [sum(t.bytes_sent for t in each.dimension_traffics("dp")) for each in (priced(zero=1), one, sharded)]
    assert bytes_of[0] == bytes_of[1] < bytes_of[2]
    assert one.predicted_seconds <= sharded.predicted_seconds
    assert sharded.memory.gradients < one.memory.gradients == priced(zero=1).memory.gradients
    third = priced(zero=3).job.strategy.accumulate  # torch.distributed.pipelining reduces after the last backward pass
    assert third == ("local" if stack_from(stack).pipeline_gradients == "whole" else "sharded")


def test_gathers_and_reductions_take_turns_on_a_communicator() -> None:
    """Under ZeRO-3 a backward pass hides one of them or the other: also their latencies, which keep no link busy."""
    case = job("llama3-8b", "dgx-h100:64", {"seq": 8192}, dp=512, zero=3)
    backward = [line for line in traffics(case, "dp") if line.in_pass == "backward"]
    assert [line.communicator for line in backward] == ["communicator"] * 2
    each = {line.seconds for line in backward}
    window = ComputeWindows(0.0, 1.2 * max(each), 0.0, 0.0)
    left = sum(line.exposed_seconds for line in with_exposed_seconds(backward, window))
    assert left == pytest.approx(sum(line.seconds for line in backward) - window.backward)
    alone = [replace(line, communicator="") for line in backward]
    assert left > 2 * sum(line.exposed_seconds for line in with_exposed_seconds(alone, window))
    for other in ({"zero": 2}, {"zero": 3, "keep_parameters": True}):
        assert not any(
            line.communicator for line in traffics(replace(case, strategy=replace(case.strategy, **other)), "dp")
        )


def test_megatrons_buckets_grow_with_the_ranks() -> None:
    """Up to a layer's parameters a bucket is a layer; then as many layers as hold a million for every rank."""

    def pieces(dp: int, **strategy: Any) -> set[float]:
        case = job("llama3-8b", f"dgx-h100:{dp // 8}", {"seq": 8192}, **{"dp": dp, "zero": 1, **strategy})
        return {traffic.count for traffic in traffics(replace(case, stack=stack_from("megatron-core")), "dp")}

    # 251 million parameters a layer, with those of embedding and head: 3 layers hold 512 million, 9 hold 2,048.
    assert pieces(64) == {32}
    assert pieces(512) == {11}
    assert pieces(2048) == {4}
    assert pieces(2048, zero=3) == {32}  # weights are gathered for every layer


def test_owners_broadcast_their_weights_after_the_update() -> None:
    """As many broadcasts as ranks, or as weights (7 matrices and 2 norms in each of 8 layers); nothing hides them."""
    for ranks, broadcasts in ((8, 8), (64, 64), (128, 72)):
        case = job(LLAMA, switched(ranks), zero=1, dp=ranks)
        gradients, weights = traffics(replace(case, stack=Stack(owned_parameters=True)), "dp")
        assert gradients.kind is CollectiveKind.ALL_REDUCE
        assert (weights.count, weights.window_share) == (pytest.approx(broadcasts), 0.0)
        assert weights.count * weights.size_bytes == pytest.approx(2 * parameter_count(LLAMA))


def test_lists_of_tensors_are_copied_one_by_one() -> None:
    """DeepSpeed of 2021 gathers lists: a copy for every rank, and all bytes read and written once more."""
    fields = {"model": "gpt3-6.7b", "cluster": "dgx-a100:4", "strategy": {"dp": 32, "zero": 3}}
    training = {"seq": 2048, "global_batch": 32}
    case = Job.from_dict({**fields, "training": training, "stack": "deepspeed-2021"})
    device = case.cluster.device
    (gather, scatter, *_) = data_traffic(case, rank_contents(case, 0))
    for one in (gather, scatter):
        plain = collective_price(one.kind, one.size_bytes, network(case.cluster), "auto")
        copies = 32 * device.efficiency.operator_seconds
        moved = 2 * one.size_bytes / (device.memory_bandwidth * device.efficiency.memory)
        assert one.cost.seconds - plain.seconds == pytest.approx(copies + moved)
