"""Weights, gradients and optimizer states: bytes per parameter by hand, ZeRO, hybrid sharding, offload."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.builders import GPT, LLAMA, MOE, job
from shardwise.cost.memory.activations import head_activation_bytes
from shardwise.cost.memory.device import memory_of_rank, per_gpu_memory_bytes
from shardwise.cost.memory.states import StateBytes, state_bytes
from shardwise.layout.stages import rank_contents
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload
from shardwise.spec.training import OPTIMIZERS, RECIPES

POINTS = Path(__file__).parents[3] / "validation" / "memory_points.csv"


def states(case: Job, rank: int = 0) -> float:
    return memory_of_rank(case, rank).states


def test_zero_figure_1_as_printed() -> None:
    with POINTS.open(newline="", encoding="utf-8") as file:
        printed = [row["value"] for row in csv.DictReader(file) if row["source"].startswith("ZeRO")]
    assert printed == ["120", "31.4", "16.6", "1.9"]
    for stage, value in enumerate(printed):
        total = state_bytes(7.5e9, zero=stage, shards=64).total / 1e9
        decimals = len(value.partition(".")[2])
        assert f"{total:.{decimals}f}" == value


# Bytes per parameter: weights, their copies, gradients, fp32 master weights, optimizer states.
BY_HAND = {
    ("bf16", "adamw"): 2 + 2 + 4 + 8,
    ("fp16", "adamw"): 2 + 2 + 4 + 8,
    ("bf16-fp32-grads", "adamw"): 2 + 4 + 4 + 8,
    ("fp32", "adamw"): 4 + 4 + 8,
    ("fp32", "sgd"): 4 + 4,
    ("fp32", "sgd-momentum"): 4 + 4 + 4,
    ("bf16", "sgd"): 2 + 2 + 4,
    ("fp8", "adamw-bf16-moments"): 2 + 2 + 4 + 4 + 2 * 2,
    ("bf16", "adam8bit"): 2 + 2 + 4 + 2 * (1 + 4 / 256),
    ("fp8", "adamw"): 2 + 2 * 1 + 4 + 4 + 8,
    ("mxfp8", "adamw"): 2 + 2 * 33 / 32 + 4 + 4 + 8,
    ("nvfp4", "adamw"): 2 + 2 * (4 + 8 / 16) / 8 + 4 + 4 + 8,
}


@pytest.mark.parametrize(("precision", "optimizer"), BY_HAND)
def test_bytes_per_parameter(precision: str, optimizer: str) -> None:
    per_parameter = state_bytes(1.0, precision=precision, optimizer=optimizer).total
    assert per_parameter == pytest.approx(BY_HAND[precision, optimizer])


def test_muon_keeps_one_moment_for_matrices_and_two_for_the_rest() -> None:
    assert state_bytes(1.0, 0.0, optimizer="muon").total == 2 + 2 + 4 + 4
    assert state_bytes(0.0, 1.0, optimizer="muon").total == 2 + 2 + 4 + 8
    case = job(GPT, dp=1, training={"optimizer": "muon"})
    matrices = 8 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64)
    rest = (512 + 128) * 64 + 8 * 4 * 64 + 2 * 64
    assert states(case) == 12 * matrices + 16 * rest


@given(
    parameters=st.floats(1, 1e13),
    shards=st.integers(1, 4096),
    precision=st.sampled_from(sorted(RECIPES)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_each_stage_divides_one_more_part(parameters: float, shards: int, precision: str, optimizer: str) -> None:
    def stage(zero: int) -> StateBytes:
        return state_bytes(parameters, precision=precision, optimizer=optimizer, zero=zero, shards=shards)

    whole = stage(0)
    assert stage(1) == StateBytes(whole.weights, whole.gradients, pytest.approx(whole.optimizer / shards))
    assert stage(2).gradients == pytest.approx(whole.gradients / shards)
    assert stage(2).weights == whole.weights
    assert stage(3).total == pytest.approx(whole.total / shards)


def test_hybrid_sharding_divides_by_its_group_only() -> None:
    parameters = rank_contents(job(LLAMA, dp=1), 0).total
    assert states(job(LLAMA, dp=16, zero=3)) == pytest.approx(16 * parameters / 16)
    assert states(job(LLAMA, dp=16, zero=3, shard_group=4)) == pytest.approx(16 * parameters / 4)
    assert states(job(LLAMA, dp=16, zero=1, shard_group=4)) == pytest.approx(parameters * (4 + 12 / 4))


def test_context_parallel_ranks_share_states_too() -> None:
    parameters = rank_contents(job(LLAMA, dp=1), 0).total
    assert states(job(LLAMA, dp=4, cp=2, zero=3)) == pytest.approx(16 * parameters / 8)


def test_experts_are_divided_by_expert_parallelism_and_sharded_over_what_is_left() -> None:
    whole = rank_contents(job(MOE, dp=1), 0)
    # 16 ranks, ep 4: each expert lives on 4 of them.
    case = job(MOE, dp=16, ep=4, zero=1)
    dense, experts = whole.dense, whole.experts / 4
    assert states(case) == pytest.approx(dense * (4 + 12 / 16) + experts * (4 + 12 / 4))
    # ep 16: nobody else holds them, there is nothing to shard.
    alone = job(MOE, dp=16, ep=16, zero=3)
    assert states(alone) == pytest.approx(16 * dense / 16 + 16 * whole.experts / 16)


def test_local_accumulation_keeps_whole_gradients() -> None:
    parameters = rank_contents(job(LLAMA, dp=1), 0).total
    sharded, local = (memory_of_rank(job(LLAMA, dp=8, zero=2, accumulate=how), 0) for how in ("sharded", "local"))
    assert sharded.gradients == pytest.approx(2 * parameters / 8)
    assert local.gradients == pytest.approx(2 * parameters)


@given(
    eighths=st.fixed_dictionaries({name: st.integers(0, 8) for name in ("optimizer", "gradients", "weights")}),
    zero=st.integers(0, 3),
)
def test_offload_moves_bytes_and_loses_none(eighths: dict[str, int], zero: int) -> None:
    shares = {name: count / 8 for name, count in eighths.items()}
    here = state_bytes(1e9, zero=zero, shards=8)
    moved = state_bytes(1e9, zero=zero, shards=8, offload=Offload(**shares))
    assert moved.total + moved.offloaded == pytest.approx(here.total)
    assert moved.optimizer == pytest.approx(here.optimizer * (1 - shares["optimizer"]))
    assert moved.weights == pytest.approx(here.weights * (1 - shares["weights"]))


def test_offloaded_activations_go_to_the_host() -> None:
    here = memory_of_rank(job(GPT, dp=1), 0)
    moved = memory_of_rank(job(GPT, dp=1, offload={"activations": 0.75, "optimizer": 1}), 0)
    of_layers = here.activations - head_activation_bytes(job(GPT, dp=1))
    on_their_way = of_layers * 2 / 8  # one leaves or comes while another is in use
    assert moved.activations == pytest.approx(here.activations - 0.75 * (of_layers - on_their_way))
    assert moved.optimizer == 0
    assert moved.total + moved.host == pytest.approx(here.total + 0.75 * on_their_way)  # these have both places


# -- the public function ---------------------------------------------------------------------------------


def test_public_function_from_a_bare_parameter_count() -> None:
    assert per_gpu_memory_bytes(parameters=7.5e9).total == 120e9
    split = per_gpu_memory_bytes(parameters=8e9, tp=4, pp=2, dp=8, zero=1)
    assert split.total == 1e9 * (4 + 12 / 8)


def test_public_function_of_a_job_is_its_fullest_device() -> None:
    case = job(GPT, dp=1, pp=4, training={"global_batch": 8})
    totals = [memory_of_rank(case, rank).total for rank in range(4)]
    assert per_gpu_memory_bytes(case).total == max(totals)
    assert len(set(totals)) > 1


@pytest.mark.parametrize("wrong", [{}, {"parameters": 1e9, "precision": "bf61"}, {"parameters": 1, "optimizer": "adm"}])
def test_public_function_says_what_is_wrong(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        per_gpu_memory_bytes(**wrong)  # type: ignore[arg-type]
