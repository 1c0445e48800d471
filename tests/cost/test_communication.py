"""Bytes that a device sends per dimension and step, derived by hand for rings on one switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost.builders import GPT, LLAMA, MLA_MOE, MOE, job, sent, sent_in, switched
from shardwise.collectives import CollectiveKind
from shardwise.cost.analysis import analyze
from shardwise.cost.communication import step_traffic
from shardwise.cost.communication.pipeline import bubble_share, exposed_messages
from shardwise.cost.prediction import predict
from shardwise.cost.sending_less import sending_less
from shardwise.cost.simulation import simulated_step
from shardwise.cost.stages import rank_contents
from shardwise.cost.traffic import Traffic
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count

HIDDEN = 128 * 64 * 2  # bytes of one microbatch of one sequence: s·h·e


def ring(model: Model, **fields: Any) -> Job:
    return job(model, **{"collective": "ring", "dp": 1, **fields})


def traffics(case: Job, dimension: str, rank: int = 0) -> list[Traffic]:
    return [t for t in step_traffic(case, rank_contents(case, rank)) if t.dimension == dimension]


def named(found: list[Traffic], *names: str) -> list[Traffic]:
    wanted = [traffic for traffic in found if traffic.what in names]
    assert len(wanted) == len(names)
    return wanted


# -- data ------------------------------------------------------------------------------------------------


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
        sent([t for t in traffics(case, "dp") if t.what.startswith("expert") == flag]) for flag in (False, True)
    )
    assert dense == pytest.approx(2 * 7 / 8 * 2 * contents.dense)
    assert experts == pytest.approx(2 * 1 / 2 * 2 * contents.experts)
    alone = traffics(ring(MOE, dp=8, ep=8), "dp")
    assert not [t for t in alone if t.what.startswith("expert")]


def test_zero_3_gathers_experts_over_their_own_group() -> None:
    case = ring(MOE, dp=8, ep=4, zero=3)
    experts = [t for t in traffics(case, "dp") if t.what.startswith("expert")]
    assert sent(experts) == pytest.approx(3 * 1 / 2 * 2 * rank_contents(case, 0).experts)


# -- tensor ----------------------------------------------------------------------------------------------

PER_LAYER_ALL_REDUCE = ("outputs, forward", "input gradients, backward")
PER_LAYER_SEQUENCE = (
    "inputs, forward",
    "outputs, forward",
    "output gradients, backward",
    "input gradients, backward",
)


def test_four_all_reduces_per_layer_and_microbatch() -> None:
    case = ring(GPT, tp=4, sequence_parallel=False, training={"global_batch": 3})
    layers = named(traffics(case, "tp"), *PER_LAYER_ALL_REDUCE)
    assert sum(t.count for t in layers) == 4 * 8 * 3
    assert {t.size_bytes for t in layers} == {HIDDEN}
    assert sent(layers) == pytest.approx(4 * 8 * 3 * 2 * 3 / 4 * HIDDEN)


def test_a_column_parallel_layer_does_not_all_reduce_its_output() -> None:
    """Forward all-reduces are two per layer, of the row-parallel outputs: of width h, not 3h or 4h."""
    case = ring(GPT, tp=4, sequence_parallel=False)
    (forward,) = named(traffics(case, "tp"), "outputs, forward")
    assert (forward.count, forward.size_bytes) == (2 * 8, HIDDEN)


def test_sequence_parallelism_sends_the_same_bytes_and_gathers_saved_inputs_again() -> None:
    plain = named(traffics(ring(GPT, tp=4, sequence_parallel=False), "tp"), *PER_LAYER_ALL_REDUCE)
    found = traffics(ring(GPT, tp=4), "tp")
    layers = named(found, *PER_LAYER_SEQUENCE)
    assert sum(t.count for t in layers) == 8 * 8  # 4 all-gathers and 4 reduce-scatters per layer
    assert sent(layers) == pytest.approx(sent(plain))
    (again,) = named(found, "saved inputs, backward")
    assert (again.kind, again.count) == (CollectiveKind.ALL_GATHER, 2 * 8)


def test_full_recompute_repeats_the_forward_collectives() -> None:
    def forward(**strategy: Any) -> float:
        return sent(named(traffics(ring(GPT, tp=4, **strategy), "tp"), "inputs, forward", "outputs, forward"))

    assert forward(recompute="full") == 2 * forward()
    assert forward(recompute="full", recompute_layers=2) == pytest.approx(1.25 * forward())
    assert forward(recompute="selective") == forward()


def test_a_parallel_block_halves_the_collectives() -> None:
    (whole,) = named(traffics(ring(GPT, tp=4, sequence_parallel=False), "tp"), "outputs, forward")
    side_by_side = replace(GPT, parallel_block=True, norms_per_layer=1)
    (half,) = named(traffics(ring(side_by_side, tp=4, sequence_parallel=False), "tp"), "outputs, forward")
    assert half.count == whole.count / 2


def test_vocabulary_is_reduced_at_both_ends_of_the_pipeline() -> None:
    case = ring(GPT, tp=2, pp=2, sequence_parallel=False)
    first, last = (traffics(case, "tp", rank) for rank in (0, 1))
    assert [t.size_bytes for t in named(first, "embedding, forward")] == [HIDDEN]
    assert [t.size_bytes for t in named(last, "head input gradient, backward", "loss")] == [HIDDEN, 3 * 4 * 128]
    assert not [t for t in first if "head" in t.what or t.what == "loss"]
    assert not [t for t in last if "embedding" in t.what]


def test_sequence_parallel_ends_gather_what_they_scattered() -> None:
    """The embedding's gradient once, the head's input forward and for the weight gradient again; m times each."""
    case = ring(GPT, tp=2, pp=2, training={"global_batch": 3})
    first, last = (traffics(case, "tp", rank) for rank in (0, 1))
    gathered = {t.what: t.count for t in (*first, *last) if "embedding" in t.what or "head" in t.what}
    assert gathered == {
        "embedding, forward": 3,
        "embedding gradient, backward": 3,
        "head input, forward and again backward": 2 * 3,
        "head input gradient, backward": 3,
    }


def test_mixture_layers_have_attention_and_the_shared_expert_only() -> None:
    """2 dense layers with 2 blocks, 6 mixture layers with attention and (if any) a shared expert."""
    assert MOE.moe
    alone = replace(MOE, moe=replace(MOE.moe, shared_ffn=0))
    for model, blocks in ((MOE, 2 * 2 + 6 * 2), (alone, 2 * 2 + 6 * 1)):
        (forward,) = named(traffics(ring(model, tp=2, ep=2, expert_tp=1), "tp"), "outputs, forward")
        assert forward.count == blocks


def test_unsplit_gradients_are_summed_under_sequence_parallelism() -> None:
    """GPT: two norms with bias (4h) and the output biases of attention and MLP (2h) per layer, and the positions."""
    (once,) = named(traffics(ring(GPT, tp=4), "tp"), "gradients of unsplit parameters")
    assert once.size_bytes == pytest.approx((8 * 6 + GPT.max_seq) * 64 * 2)
    assert once.count == 1
    plain = traffics(ring(GPT, tp=4, sequence_parallel=False), "tp")
    assert not [t for t in plain if "unsplit" in t.what]


def test_latent_projections_are_unsplit() -> None:
    (once,) = named(traffics(ring(MLA_MOE, tp=2, ep=1), "tp"), "gradients of unsplit parameters")
    h, q, kv, rope, experts = 64, 24, 16, 4, 16
    layer = 2 * h + h * (q + kv + rope) + q + kv
    layers = 8 + 1  # and the prediction module's
    assert once.size_bytes == pytest.approx(2 * (layers * layer + 8 * h * experts))


@pytest.mark.parametrize(("ep", "copies"), [(1, 1), (2, 4)])
def test_experts_split_by_tensor_parallelism_gather_their_tokens(ep: int, copies: int) -> None:
    """expert_tp 2, top 4: 64 own tokens become 2·64 rows, 4 of each where they come from other ranks; gathered and
    reduced each way in 6 layers."""
    case = ring(MOE, tp=2, expert_tp=2, ep=ep, dp=ep)
    expert = [t for t in traffics(case, "tp") if t.what.startswith("expert")]
    assert {t.size_bytes for t in expert} == {2 * 64 * copies * 64 * 2}
    assert sum(t.count for t in expert) == 4 * 6
    whole_experts = traffics(ring(MOE, tp=2, expert_tp=1, ep=2), "tp")
    assert not [t for t in whole_experts if t.what.startswith("expert")]


@pytest.mark.parametrize(("expert_tp", "kind"), [(2, CollectiveKind.ALL_REDUCE), (1, CollectiveKind.ALL_GATHER)])
def test_ranks_with_the_same_tokens_sum_split_experts_or_share_the_tokens(expert_tp: int, kind: CollectiveKind) -> None:
    case = ring(MOE, tp=2, expert_tp=expert_tp, sequence_parallel=False)
    expert = [t for t in traffics(case, "tp") if t.what.startswith("expert")]
    assert [(t.kind, t.size_bytes, t.count) for t in expert] == 2 * [(kind, 128 * 64 * 2, 6)]


def test_experts_without_sequence_parallelism_move_no_more_than_with_it() -> None:
    def expert_bytes(sequence_parallel: bool) -> float:
        case = ring(MOE, tp=2, sequence_parallel=sequence_parallel)
        return sent([t for t in traffics(case, "tp") if t.what.startswith("expert")])

    assert expert_bytes(False) == expert_bytes(True)


# -- pipeline --------------------------------------------------------------------------------------------


def test_a_boundary_carries_one_activation_each_way_per_microbatch() -> None:
    case = job(LLAMA, dp=1, pp=4, training={"global_batch": 6})
    found = traffics(case, "pp", 1)
    assert {(t.size_bytes, t.count) for t in found} == {(HIDDEN, 6)}
    assert sent(found) == 2 * 6 * HIDDEN


def test_sequence_parallelism_divides_the_boundary_by_tp() -> None:
    split, whole = (job(LLAMA, dp=1, pp=2, tp=2, sequence_parallel=sp) for sp in (True, False))
    assert sent(traffics(split, "pp")) == sent(traffics(whole, "pp")) / 2


def test_interleaving_sends_v_times_the_messages() -> None:
    plain = job(LLAMA, dp=1, pp=2, training={"global_batch": 4})
    interleaved = job(LLAMA, dp=1, pp=2, schedule="interleaved", interleave=4, training={"global_batch": 4})
    assert sent(traffics(interleaved, "pp")) == 4 * sent(traffics(plain, "pp"))


def test_both_ends_sum_the_gradients_of_a_tied_embedding() -> None:
    case = job(GPT, dp=1, tp=2, pp=4)
    size = 512 * 64 / 2 * 2
    for rank, expected in ((0, size), (1, 0), (2, 0), (3, size)):
        assert sent(traffics(case, "pp", rank), "embedding") == expected
    assert sent(traffics(job(LLAMA, dp=1, tp=2, pp=4), "pp"), "embedding") == 0
    folded = job(GPT, dp=1, pp=4, schedule="zbv", training={"global_batch": 8})
    assert sent(traffics(folded, "pp"), "embedding") == 0  # one tensor on the first rank


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 64)])
def test_messages_on_the_critical_path_of_1f1b(p: int, m: int) -> None:
    """2(p−1)m/p + 2(p−2), from the event simulation (accuracy notes, section 6); overlapped only fill and drain."""
    case = job(LLAMA, dp=1, pp=p, training={"global_batch": m})
    assert exposed_messages(case) == 2 * (p - 1) * m / p + 2 * (p - 2)
    hidden = job(LLAMA, dp=1, pp=p, training={"global_batch": m}, overlap={"pp": True})
    assert exposed_messages(hidden) == 2 * (p - 1)


def test_a_single_microbatch_waits_for_every_message() -> None:
    assert exposed_messages(job(LLAMA, dp=1, pp=4)) == 2 * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zbv", "dualpipev"])
def test_no_price_of_a_step_is_below_what_a_slow_link_carries(schedule: str) -> None:
    """Floor, closed form and simulation: every message of a microbatch over the same 200 Mb/s, one after the other."""
    chunks = {"interleave": 2} if schedule == "interleaved" else {}
    case = far_apart(tp=1, cp=4, dp=4, pp=2, schedule=schedule, order=["tp", "cp", "dp", "pp"], **chunks)
    messages = {"interleaved": 3, "zbv": 2, "dualpipev": 2}.get(schedule, 1) * case.microbatches
    prediction = predict(case)
    carried = messages * prediction.slowest.message_seconds
    assert carried > 10 * case.microbatches * prediction.slowest.microbatch_seconds
    assert analyze(case).step_seconds >= carried
    assert prediction.pipeline_seconds >= carried
    assert simulated_step(prediction).pipeline_seconds >= carried


# Idle time over busy time with F = B = W = 1 (formulas D.4): p = 4, m = 16.
BUBBLES = {
    "gpipe": 3 / 16,
    "1f1b": 3 / 16,
    "interleaved": 3 / 16 / 2,
    "zb-h1": 3 * (1 + 1 - 1) / (3 * 16),
    "zb-h2": 0,
    "zbv": 0,
    # (p/2 − 1)(F + I − W), as its own actions simulate; the README's figure takes F and B as one block.
    "dualpipe": (4 / 2 - 1) * (1 + 1 - 1) / (3 * 16),
    "dualpipev": (4 - 1) * (1 + 1 - 1) / (3 * 2 * 16),  # two half stages on each of 4 ranks
}


@pytest.mark.parametrize("schedule", BUBBLES)
def test_bubbles(schedule: str) -> None:
    assert bubble_share(schedule, 4, 16, 2) == pytest.approx(BUBBLES[schedule])
    assert bubble_share(schedule, 1, 16, 2) == 0


# -- context ---------------------------------------------------------------------------------------------

# One sequence of 128 tokens over 4 ranks; keys and values of 2 heads of 8, 2 bytes.
KEYS_VALUES = 128 * 2 * 2 * 8 * 2


def test_ring_attention_sends_keys_and_values_and_their_gradients() -> None:
    case = job(LLAMA, dp=1, cp=4)
    forward, backward = traffics(case, "cp")
    assert forward.bytes_sent == pytest.approx(8 * 3 / 4 * KEYS_VALUES)
    assert backward.bytes_sent == pytest.approx(8 * 2 * 3 / 4 * KEYS_VALUES)
    assert (forward.window, backward.window) == ("attention forward", "attention backward")


def test_gathered_context_is_gathered_twice_and_its_gradients_scattered() -> None:
    found = traffics(ring(LLAMA, cp=4, context_method="all-gather"), "cp")
    assert sent(found) == pytest.approx(8 * 3 * 3 / 4 * KEYS_VALUES)
    assert {t.window for t in found} == {"none"}


def test_ulysses_exchanges_queries_keys_values_and_output() -> None:
    """(2h + 2h_kv)·b·s/c·e·(c−1)/c each way; 2 key-value heads are repeated to one per rank, 4."""
    found = traffics(job(LLAMA, dp=1, cp=4, context_method="ulysses", collective="direct"), "cp")
    one_way = (2 * 64 + 2 * 4 * 8) * 128 / 4 * 2 * 3 / 4
    assert sent(found) == pytest.approx(8 * 2 * one_way)


def test_ulysses_of_multi_head_attention_is_the_papers_4_n_h_over_p() -> None:
    found = traffics(job(GPT, dp=1, cp=4, context_method="ulysses", collective="direct"), "cp")
    (forward,) = named(found, "q, k, v and output, forward")
    assert forward.count * forward.size_bytes == pytest.approx(8 * 4 * 128 * 64 / 4 * 2)


def test_tensor_parallelism_divides_what_context_parallelism_sends() -> None:
    whole, split, repeated = (sent(traffics(job(LLAMA, dp=1, cp=2, tp=tp), "cp")) for tp in (1, 2, 4))
    assert split == whole / 2
    assert repeated == split  # 2 key-value heads


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        ({}, 1),
        ({"recompute": "full"}, 2),
        ({"recompute": "full", "recompute_layers": 2}, 1.25),
    ],
)
def test_recompute_repeats_the_forward_exchange(strategy: dict[str, Any], passes: float) -> None:
    forward, _ = traffics(job(LLAMA, dp=1, cp=4, **strategy), "cp")
    assert forward.bytes_sent == pytest.approx(passes * 8 * 3 / 4 * KEYS_VALUES)


# -- offload ---------------------------------------------------------------------------------------------


def offload(shares: dict[str, float], **strategy: Any) -> list[Traffic]:
    cluster = switched(8, host_link={"bandwidth": 1e9, "latency": 0})
    return traffics(job(MOE, cluster, **{"dp": 8, "offload": shares, **strategy}), "offload")


def test_offloaded_optimizer_moves_gradients_down_and_weights_up_once() -> None:
    parameters = parameter_count(MOE)
    assert sent(offload({"optimizer": 1})) == pytest.approx(2 * 2 * parameters)
    assert sent(offload({"optimizer": 0.5}, zero=1)) == pytest.approx(0.5 * 2 * 2 * parameters / 8)


def test_what_lives_on_the_host_is_not_moved_for_the_optimizer_again() -> None:
    everything = offload({"optimizer": 1, "gradients": 1, "weights": 1})
    parts = [*offload({"gradients": 1}), *offload({"weights": 1})]
    assert sent(everything) == pytest.approx(sent(parts))


def test_offloaded_weights_come_up_in_both_passes_of_every_microbatch() -> None:
    """ep 8: experts are whole on their device, only the dense rest is sharded."""
    case = job(MOE, dp=8, ep=8)
    contents = rank_contents(case, 0)
    found = offload({"weights": 1}, ep=8, zero=3)
    assert sent(found) == pytest.approx(2 * 2 * (contents.dense / 8 + contents.experts))
    assert {t.window for t in found} == {"forward", "backward"}


def test_offloaded_weights_gradients_and_activations_move_every_microbatch() -> None:
    for share in ("weights", "gradients", "activations"):
        once, four = (offload({share: 1}, zero=3, training={"global_batch": 8 * m}) for m in (1, 4))
        assert sent(four) == pytest.approx(4 * sent(once))
    once, four = (offload({"optimizer": 1}, training={"global_batch": 8 * m}) for m in (1, 4))
    assert sent(four) == sent(once)


def test_dimensions_without_ranks_send_nothing() -> None:
    analysis = analyze(job(LLAMA, dp=1))
    assert analysis.traffics == ()
    assert analysis.exposed_share == 0
    assert sent_in(analysis, "dp") == 0


# -- sending less -------------------------------------------------------------------------------------


def far_apart(**strategy: Any) -> Job:
    """Two sites with a line of 200 Mb/s between them; what is data parallel crosses it."""
    fields = {"tp": 8, "dp": 4, "order": ["tp", "cp", "pp", "dp"], **strategy}
    training = {"global_batch": 256, "seq": 4096}
    return Job.from_dict(
        {"model": "llama3-8b", "cluster": "over-the-internet", "strategy": fields, "training": training}
    )


def test_meeting_seldom_pays_over_the_internet() -> None:
    plain = predict(far_apart()).step_seconds
    seldom = [predict(far_apart(synchronise={"method": "diloco", "inner_steps": n})).step_seconds for n in (8, 64)]
    assert plain > 3 * seldom[0] > 12 * seldom[1]  # fp32 weights, not bf16 gradients
    assert predict(far_apart(synchronise="async")).step_seconds < plain


def test_factors_are_the_fewest_bytes_and_signs_come_next() -> None:
    def bytes_sent(method: str) -> float:
        return sum(one.bytes_sent for one in traffics(far_apart(compression=method), "dp"))

    sizes = [bytes_sent(method) for method in ("powersgd", "1bit", "int8", "bf16", "none")]
    assert sizes == sorted(sizes)


def test_a_step_that_waits_for_gradients_is_told_what_would_pay() -> None:
    assert "strategy.synchronise=diloco" in (sending_less(far_apart()) or "")
    assert sending_less(far_apart(synchronise="diloco")) is None
    inside = Job.from_dict({"model": "llama3-8b", "cluster": "dgx-h100:1", "strategy": {"tp": 8},
                            "training": {"global_batch": 256, "seq": 4096}})  # fmt: skip
    assert sending_less(inside) is None
