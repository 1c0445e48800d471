"""Activations in flight, gathered layers, recomputed layers and buffers of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cost.builders import DENSE, GPT, LLAMA, MIXTURE, MLA_MOE, MOE, job
from shardwise.cost.memory.activations import head_activation_bytes, layer_activation_bytes
from shardwise.cost.memory.device import activation_bytes, memory_at_moments, memory_of_rank, peak_memory
from shardwise.cost.memory.in_flight import chunks_in_flight
from shardwise.layout.stages import rank_contents
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.schedules import job_schedules, schedule_record

SCHEDULES = job_schedules()


def pipeline(schedule: str, microbatches: int = 32, **strategy: Any) -> Job:
    interleave = 2 if schedule == "interleaved" else 1
    training = {"global_batch": microbatches}
    return job(LLAMA, training=training, dp=1, pp=4, schedule=schedule, interleave=interleave, **strategy)


def in_flight(case: Job, rank: int = 0) -> float:
    return chunks_in_flight(case, rank) / case.strategy.chunks_per_rank


# Microbatches alive on the fullest rank of p = 4 (formulas D.4).
IN_FLIGHT = {
    "gpipe": 32,
    "1f1b": 4,
    "interleaved": 4 * (1 + 3 / (4 * 2)),
    "zb-h1": 4,
    "zb-1p": 4,
    "zb-h2": 7,
    "zb-2p": 8,
    "zbv": 4,
    "dualpipe": 5,
    "dualpipev": 9 / 2,  # PP + 1 chunks, PP = 8 half stages
}


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_microbatches_in_flight(schedule: str) -> None:
    case = pipeline(schedule)
    assert max(in_flight(case, rank) for rank in range(4)) == pytest.approx(IN_FLIGHT[schedule])


@pytest.mark.parametrize(("schedule", "share"), [("v-half", 1 / 2), ("v-min", 1 / 3)])
def test_v_schedules_hold_their_share_of_1f1b_and_a_few_chunks(schedule: str, share: float) -> None:
    """Qi et al. 2024: a half and a third of 1F1B asymptotically, plus a constant number of chunks."""
    held = in_flight(job("gpt3-175b", training={"global_batch": 512}, dp=1, pp=48, schedule=schedule))
    assert share * 48 <= held <= share * 48 + 1.5


def test_1f1b_holds_one_microbatch_less_on_every_later_rank() -> None:
    case = pipeline("1f1b")
    assert [in_flight(case, rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_more_are_in_flight_than_there_are(schedule: str) -> None:
    assert in_flight(pipeline(schedule, microbatches=4)) <= 4
    assert in_flight(job(LLAMA, dp=1, schedule="1f1b", training={"global_batch": 8})) == 1
    assert schedule_record(schedule).source


def test_first_rank_of_1f1b_keeps_all_layers_once() -> None:
    """L/p layers times p microbatches in flight."""
    case = pipeline("1f1b")
    one = layer_activation_bytes(case, DENSE)
    assert activation_bytes(case, rank_contents(case, 0)) == pytest.approx(8 * one)
    assert activation_bytes(case, rank_contents(case, 3)) == pytest.approx(2 * one + head_activation_bytes(case))


def test_gpipe_keeps_the_logits_of_every_microbatch() -> None:
    case = pipeline("gpipe", microbatches=6)
    last = activation_bytes(case, rank_contents(case, 3))
    assert last == pytest.approx(6 * (2 * layer_activation_bytes(case, DENSE) + head_activation_bytes(case)))


def test_accumulation_alone_saves_no_memory_and_costs_none() -> None:
    few, many = (peak_memory(job(GPT, dp=1, training={"global_batch": batch})).total for batch in (1, 64))
    assert few == many


def test_some_layers_recomputed() -> None:
    def kept(**strategy: Any) -> float:
        case = job(LLAMA, dp=1, **strategy)
        return activation_bytes(case, rank_contents(case, 0))

    none, full = kept(), kept(recompute="full")
    assert kept(recompute="full", recompute_layers=2) == pytest.approx(none + (full - none) * 2 / 8)
    assert kept(recompute="full", recompute_layers=0) == none
    assert kept(recompute="full", recompute_layers=99) == full


def test_a_layer_is_brought_back_when_whole_ones_have_gone() -> None:
    def recomputed(**strategy: Any) -> float:
        case = job(LLAMA, dp=1, recompute="full", **strategy)
        return memory_at_moments(case, rank_contents(case, 0))["layer"].recomputed

    assert recomputed(recompute_layers=7) == 0
    assert recomputed(recompute_layers=8) == recomputed() > 0
    # Two stages on each of two ranks, with two layers each: only where both have a whole one behind.
    interleaved = {"pp": 2, "schedule": "interleaved", "interleave": 2, "training": {"global_batch": 4}}
    assert recomputed(recompute_layers=2, **interleaved) == 0
    assert recomputed(recompute_layers=3, **interleaved) > 0


def test_recompute_brings_one_layer_back() -> None:
    case = job(LLAMA, dp=1, recompute="full")
    whole, checkpoint = (layer_activation_bytes(case, DENSE, recompute=mode) for mode in ("none", "full"))
    moments = memory_at_moments(case, rank_contents(case, 0))
    assert moments["layer"].recomputed == whole - checkpoint
    assert moments["loss"].recomputed == 0  # the layers' backward passes come later
    assert memory_of_rank(case, 0).total == max(one.total for one in moments.values())
    assert memory_of_rank(job(LLAMA, dp=1), 0).recomputed == 0


def test_zero_3_holds_two_gathered_layers_the_ends_and_one_gradient() -> None:
    contents = rank_contents(job(LLAMA, dp=1), 0)
    one_layer, ends = contents.layer_matrices / 8, contents.others
    assert memory_of_rank(job(LLAMA, dp=4, zero=3), 0).gathered == pytest.approx(one_layer * (2 * 2 + 2) + 2 * ends)
    assert memory_of_rank(job(LLAMA, dp=4, zero=2), 0).gathered == pytest.approx(one_layer * 2)
    kept = memory_of_rank(job(LLAMA, dp=4, zero=3, keep_parameters=True), 0)
    assert kept.gathered == pytest.approx(parameter_count(LLAMA) * 2 + one_layer * 2)
    assert memory_of_rank(job(LLAMA, dp=1, zero=3), 0).gathered == 0


def test_experts_that_nobody_shares_are_not_gathered() -> None:
    shared = memory_of_rank(job(MOE, dp=8, ep=4, zero=3), 0)
    alone_job = job(MOE, dp=8, ep=8, zero=3)
    alone = memory_of_rank(alone_job, 0)
    contents = rank_contents(alone_job, 0)
    assert alone.gathered == pytest.approx(contents.layer_matrices / 8 * 6 + contents.others * 2)
    assert shared.gathered > alone.gathered


def test_prediction_module_keeps_a_layer_and_a_loss() -> None:
    with_module, without = (job(model, dp=1) for model in (MLA_MOE, replace(MLA_MOE, mtp_layers=0)))
    extra = activation_bytes(with_module, rank_contents(with_module, 0))
    extra -= activation_bytes(without, rank_contents(without, 0))
    # Two norms keep a state each, and the projection both again, all in bf16.
    joined = (2 + 2) * 2 * without.model.hidden * without.microbatch_tokens
    assert extra == pytest.approx(layer_activation_bytes(without, MIXTURE) + head_activation_bytes(without) + joined)


def test_parts_add_up_and_the_allowance_is_the_device_s() -> None:
    case = job(LLAMA, "dgx-h100:2", tp=2, dp=2, pp=4, zero=1, recompute="selective", training={"global_batch": 16})
    for rank in range(4):
        memory = memory_of_rank(case, rank)
        parts = memory.to_dict()
        assert memory.total == pytest.approx(sum(parts[f"{name}_bytes"] for name in memory.PARTS))
        assert memory.allowance == case.cluster.device.framework_memory > 0


def test_buffers_follow_the_dimensions_in_use() -> None:
    """One token vector is 64 · 2 bytes; 128 tokens."""
    vector = 64 * 2

    def buffers(**strategy: Any) -> float:
        return memory_of_rank(job(MOE, **{"dp": 1, **strategy}), 0).communication

    assert buffers() == 0
    assert buffers(tp=2) == 128 * vector  # the gathered input
    assert buffers(pp=2) == 2 * 128 * vector  # an activation and a gradient
    assert buffers(dp=2, ep=2) == 2 * 128 * 4 * vector  # top-4 tokens sent and received
    assert buffers(cp=2) == 2 * 64 * (2 * 4 * 8 * 2)  # two blocks of keys and values of 64 tokens
