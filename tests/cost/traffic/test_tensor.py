"""Bytes that tensor and sequence parallelism send in a step, derived by hand for rings on one switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost.builders import (
    GPT,
    HIDDEN,
    MLA_MOE,
    MOE,
    named,
    ring,
    sent,
    traffics,
)
from shardwise.collectives import CollectiveKind
from shardwise.layout.payloads import Share

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
    expert = [t for t in traffics(case, "tp") if t.payload.share is Share.EXPERTS]
    assert {t.size_bytes for t in expert} == {2 * 64 * copies * 64 * 2}
    assert sum(t.count for t in expert) == 4 * 6
    whole_experts = traffics(ring(MOE, tp=2, expert_tp=1, ep=2), "tp")
    assert not [t for t in whole_experts if t.payload.share is Share.EXPERTS]


@pytest.mark.parametrize(("expert_tp", "kind"), [(2, CollectiveKind.ALL_REDUCE), (1, CollectiveKind.ALL_GATHER)])
def test_ranks_with_the_same_tokens_sum_split_experts_or_share_the_tokens(expert_tp: int, kind: CollectiveKind) -> None:
    case = ring(MOE, tp=2, expert_tp=expert_tp, sequence_parallel=False)
    expert = [t for t in traffics(case, "tp") if t.payload.share is Share.EXPERTS]
    assert [(t.kind, t.size_bytes, t.count) for t in expert] == 2 * [(kind, 128 * 64 * 2, 6)]


def test_experts_without_sequence_parallelism_move_no_more_than_with_it() -> None:
    def expert_bytes(sequence_parallel: bool) -> float:
        case = ring(MOE, tp=2, sequence_parallel=sequence_parallel)
        return sent([t for t in traffics(case, "tp") if t.payload.share is Share.EXPERTS])

    assert expert_bytes(False) == expert_bytes(True)


def test_every_projection_may_gather_its_input_by_itself() -> None:
    """GPT's queries, keys and values, and its one up-projection, are four instead of two readers of hidden states."""
    once = ring(GPT, tp=4, recompute="full")
    each = replace(once, stack=once.stack.changed(tp_inputs="each"))
    counts = [{t.what: t.count for t in traffics(case, "tp")} for case in (once, each)]
    for what in ("inputs, forward", "input gradients, backward"):
        (whole,) = (name for name in counts[0] if name.startswith(what))
        assert counts[1][whole] == 2 * counts[0][whole]
    assert counts[0]["outputs, forward"] == counts[1]["outputs, forward"]
    assert "saved inputs, backward" in counts[0] and "saved inputs, backward" not in counts[1]
    plain = [
        ring(GPT, tp=4, sequence_parallel=False),
        replace(each, strategy=replace(each.strategy, sequence_parallel=False)),
    ]
    sums = [{t.what: t.count for t in traffics(case, "tp")}["input gradients, backward"] for case in plain]
    assert sums[1] == 2 * sums[0]
