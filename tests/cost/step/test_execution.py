"""What a stack does with the same layers and collectives: beside what they run, which kernels and copies it adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.step.prediction import RankPrediction, predict
from shardwise.cost.step.stage_time import optimizer_seconds, stage_seconds
from shardwise.cost.traffic.execution import busy_share
from shardwise.cost.traffic.pipeline import message_traffic
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from


def job(stack: str, cluster: str = "dgx-h100:1", training: dict[str, Any] | None = None, **strategy: Any) -> Job:
    described = stack_from(stack)
    overlap = {"overlap": described.overlap} | strategy
    fields = {"model": "llama3-8b", "cluster": cluster, "strategy": overlap, "stack": described}
    return Job.from_dict({**fields, "training": {"seq": 8192, **(training or {})}})


def with_flags(case: Job, **flags: Any) -> Job:
    return replace(case, stack=replace(case.stack, **flags))


def tensor_lines(case: Job) -> dict[str, Traffic]:
    rank: RankPrediction = predict(case).ranks[0]
    return {traffic.what: traffic for traffic in rank.traffics if traffic.dimension == "tp"}


# -- tensor parallelism --------------------------------------------------------------------------------


def test_backward_collectives_run_beside_the_product_that_does_not_need_them() -> None:
    beside, in_turn = (tensor_lines(job(stack, tp=8)) for stack in ("simumax", "torchtitan"))
    for what in ("input gradients, backward", "saved inputs, backward"):
        assert beside[what].exposed_seconds < 0.4 * beside[what].seconds
        assert in_turn[what].exposed_seconds == in_turn[what].seconds
    for what in ("inputs, forward", "outputs, forward", "output gradients, backward"):
        assert beside[what].exposed_seconds == beside[what].seconds


def test_async_tp_hides_what_pytorch_fuses_and_only_beside_its_own_product() -> None:
    plain, cut = (tensor_lines(job("torchtitan", tp=8, overlap={"tp": on})) for on in (False, True))
    fused = ("inputs, forward", "outputs, forward", "output gradients, backward")
    for what in fused:
        # One of eight pieces has nothing to run under; the product of a narrow block is shorter than its collective.
        assert 1 / 8 < cut[what].exposed_seconds / plain[what].seconds < 1
    for what in ("input gradients, backward", "saved inputs, backward"):
        assert cut[what].exposed_seconds == plain[what].seconds


def test_our_exchange_overlaps_chunk_by_chunk() -> None:
    """In two chunks: half of each exchange has the experts of the other chunk beside it, a dispatch also the shared."""
    routed = {"experts": 64, "top_k": 2, "ffn": 16384}
    model = {"layers": 4, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 1024}
    strategy = {"ep": 8, "dp": 8, "overlap": {"ep": True}}
    found = {}
    for shared in (0, 16384):
        fields = {"model": {**model, "moe": {**routed, "shared_ffn": shared}}, "cluster": "dgx-h100:1"}
        case = Job.from_dict({**fields, "strategy": strategy, "training": {"seq": 8192, "global_batch": 8}})
        found[shared] = {one.what: one.exposed_seconds / one.seconds for one in predict(case).ranks[0].traffics}
    for way in ("forward", "backward"):
        assert found[0][f"combine, {way}"] == found[16384][f"combine, {way}"] == pytest.approx(0.5)
        assert found[0][f"dispatch, {way}"] == pytest.approx(0.5)
        assert found[16384][f"dispatch, {way}"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("schedule", "degrees", "alone"), [("1f1b", {"dp": 8}, 1 / 4), ("interleaved", {"dp": 4, "pp": 2}, 2 / 8)]
)
def test_an_exchange_has_no_other_microbatch_beside_it_at_the_ends_of_a_step(
    schedule: str, degrees: dict[str, int], alone: float
) -> None:
    """The first forward and the last backward passes run alone; between them HybridEP's units slow the others."""
    model = {"layers": 4, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 1024}
    moe = {"experts": 64, "top_k": 2, "ffn": 16384}
    strategy = {
        **degrees,
        "ep": 4,
        "dispatch": "deduplicated",
        "schedule": schedule,
        "interleave": 2 if schedule == "interleaved" else 1,
    }
    fields = {"model": {**model, "moe": moe}, "cluster": "dgx-b200:1", "stack": "megatron-bridge"}
    training = {"seq": 8192, "global_batch": 32}
    case = Job.from_dict({**fields, "strategy": {**strategy, "overlap": {"ep": True}}, "training": training})
    exchanges = [one for one in predict(case).ranks[0].traffics if one.dimension == "ep"]
    assert len(exchanges) == 4
    for one in exchanges:
        assert one.exposed_seconds / one.seconds == pytest.approx(alone)
        assert one.units_taken == pytest.approx(32 / 148)


def test_a_collective_at_the_networks_speed_takes_few_channels() -> None:
    assert busy_share("nvlink", {"nvlink": 2.0}) == 1
    assert busy_share("nvlink", {"infiniband": 2.0}) == 0
    assert busy_share("nvlink", {"nvlink": 1.0, "infiniband": 4.0}) == 0.25


# -- messages ------------------------------------------------------------------------------------------


def test_scattered_messages_cross_the_network_once_and_are_gathered_behind_it() -> None:
    whole = job("megatron-core", "dgx-a100:2", tp=8, pp=2, sequence_parallel=False)
    one, parts, split = (
        message_traffic(case, "activations")
        for case in (
            whole,
            with_flags(whole, scattered_messages=True),
            replace(whole, strategy=replace(whole.strategy, sequence_parallel=True)),
        )
    )
    assert one and parts and split
    network = [traffic.level_seconds["infiniband"] for traffic in (one, parts, split)]
    assert network[0] / 8 == pytest.approx(network[1]) == pytest.approx(network[2])
    assert parts.level_seconds["nvlink"] > 0
    assert float(parts.cost.seconds) < float(one.cost.seconds) / 3


# -- kernels and copies --------------------------------------------------------------------------------


def test_an_eager_stack_moves_more_than_a_compiled_one() -> None:
    compiled = job("torchtitan")
    seconds = [
        stage_seconds(with_flags(compiled, elementwise=kind), rank_contents(compiled, 0)).total
        for kind in ("compiled", "eager")
    ]
    assert 1.05 < seconds[1] / seconds[0] < 1.4


def test_separate_casts_cost_more_and_only_in_8_bit() -> None:
    def total(casts: str, precision: str) -> float:
        case = with_flags(job("torchtitan", training={"precision": precision}), casts=casts)
        return stage_seconds(case, rank_contents(case, 0)).total

    assert total("fused", "fp8") < total("transposed", "fp8") < total("separate", "fp8") < 1.4 * total("fused", "fp8")
    assert total("fused", "bf16") == total("separate", "bf16")


def test_an_odd_vocabulary_takes_a_slow_kernel_where_nothing_pads_it() -> None:
    """Of GPT-2's 50,257 on A100, 112,046 tokens/s were measured, with 50,304 127,345 (rasbt/LLMs-from-scratch)."""

    def head_seconds(vocab: int, **flags: Any) -> float:
        case = with_flags(job("accelerate", "dgx-a100:1"), **flags)
        case = replace(case, model=replace(case.model, vocab=vocab))
        last = replace(rank_contents(case, 0), kinds=())
        return stage_seconds(case, last).total

    assert 1.8 < head_seconds(50_257) / head_seconds(50_304) < 2.4
    assert head_seconds(50_257, odd_sizes="padded") == pytest.approx(head_seconds(50_304), rel=2e-3)
    assert head_seconds(50_258) == pytest.approx(head_seconds(50_304), rel=2e-3)


def test_a_vocabulary_that_tensor_parallelism_makes_odd_is_slow_too() -> None:
    """50,258 in two parts are 25,129."""
    case = job("nanotron", tp=2)
    parts = [replace(case, model=replace(case.model, vocab=vocab)) for vocab in (50_258, 50_260)]
    odd, even = (stage_seconds(part, rank_contents(part, 0)).total for part in parts)
    assert odd > 1.05 * even


def test_a_loss_of_many_kernels_moves_every_logit_many_times() -> None:
    case = job("megatron-core")
    memory = case.cluster.device.memory_bandwidth * case.cluster.device.efficiency.memory
    seconds = {
        kind: stage_seconds(with_flags(case, loss=kind), rank_contents(case, 0)).total
        for kind in ("fused", "plain", "steps", "parallel")
    }
    logits = case.microbatch_tokens * case.model.vocab
    assert list(seconds) == sorted(seconds, key=seconds.__getitem__)
    assert seconds["parallel"] - seconds["fused"] == pytest.approx((52 - 10) * logits / memory)


@pytest.mark.parametrize(("seq", "measured"), [(256, 1.0), (512, 1.0), (1024, 1.1)])
def test_short_sequences_wait_for_the_host_that_launches_their_kernels(seq: int, measured: float) -> None:
    """Qwen-1.8B on one A100 with recompute, eight microbatches a step (QwenLM/Qwen README, LoRA)."""
    model = {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 151936, "max_seq": 8192,
             "activation": "swiglu", "norm": "rmsnorm", "qkv_bias": True}  # fmt: skip
    strategy, training = {"recompute": "full", "microbatch": 1}, {"global_batch": 8, "seq": seq}
    cluster = cluster_from("dgx-a100").with_devices(1)
    case = Job.from_dict(
        {"model": model, "cluster": cluster, "strategy": strategy, "training": training, "stack": "accelerate"}
    )
    assert predict(case).step_seconds == pytest.approx(measured, rel=0.06)
    assert predict(with_flags(case, launches="ahead")).step_seconds < 0.7 * measured
    assert predict(with_flags(case, cuda_graphs="full")).step_seconds < 0.7 * measured


def test_long_sequences_do_not_wait_for_the_host() -> None:
    case = job("torchtitan")
    seconds = [
        stage_seconds(with_flags(case, launches=how), rank_contents(case, 0)).total for how in ("ahead", "one by one")
    ]
    assert seconds[0] == seconds[1]


def test_an_update_that_is_not_fused_moves_each_operand_of_each_step() -> None:
    """Twenty elements of a shard instead of seven: 1% of a step of 3.1 s. Fusing saves 1.6 to 3.6% (torchtitan pull
    requests 355 and 881)."""
    case = job("torchtitan", "dgx-a100:1", zero=3)
    contents, sharding = rank_contents(case, 0), sharding_of(case.strategy)
    fused, foreach, single = (
        float(optimizer_seconds(with_flags(case, adamw=how), contents, sharding))
        for how in ("in place", "foreach", "one by one")
    )
    device = case.cluster.device
    more = 4 * (20 - 7) * contents.total / 8 / (device.memory_bandwidth * device.efficiency.memory)
    assert foreach - fused == single - fused == pytest.approx(more)
    assert 0.02 < more < 0.04


def test_shards_of_every_parameter_by_itself_are_copied_by_the_host() -> None:
    """Seven matrices of 32 layers, a part for each of 64 ranks, once in and once out."""
    case = job("nanotron", "p5-h100:8", zero=1)
    contents, sharding = rank_contents(case, 0), sharding_of(case.strategy)
    apart, together = (
        float(optimizer_seconds(with_flags(case, per_parameter_shards=flag), contents, sharding))
        for flag in (True, False)
    )
    assert apart - together == pytest.approx(2 * 7 * 32 * 64 * case.cluster.device.efficiency.operator_seconds)
    gathered = [traffic for traffic in predict(case).ranks[0].traffics if traffic.what == "parameters, forward"]
    assert gathered[0].exposed_seconds == pytest.approx(gathered[0].seconds)
