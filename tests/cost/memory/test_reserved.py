"""What an allocator holds beside its tensors, and both against our own measurements (validation/reserved.csv)."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from cost.builders import LLAMA, MOE, job
from shardwise.accuracy.runs import read_runs
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.memory.room import (
    FRAGMENTATION,
    LAUNCH_QUEUE,
    late_gradient_bytes,
    reserved_bytes,
    waiting_bytes,
    workspace_bytes,
)
from shardwise.layout.stages import rank_contents
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack, stack_from

VALIDATION = Path(__file__).parents[3] / "validation"
JOBS = {run.row_id: run.job for run in read_runs(VALIDATION / "training_runs.csv")}
with (VALIDATION / "reserved.csv").open(newline="", encoding="utf-8") as file:
    MEASURED = list(csv.DictReader(file))
SEGMENTS = [row for row in MEASURED if row["row_id"].startswith("nanotron") and row["collectives_wait"] == "no"]
WAITING = [row for row in MEASURED if row["collectives_wait"] == "yes"]
EXPANDABLE = [row for row in MEASURED if row["row_id"].startswith("titan")]


def on(stack: str, case: Job) -> Job:
    return replace(case, stack=stack_from(stack))


def gib(row: dict[str, str], column: str) -> float:
    return float(row[column]) * 2**30


# -- measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", SEGMENTS, ids=lambda row: row["row_id"])
def test_an_eager_step_allocates_what_its_saved_tensors_add_up_to(row: dict[str, str]) -> None:
    """The measured layer keeps queries, keys and values once."""
    case = JOBS[row["row_id"]]
    case = replace(case, stack=replace(case.stack, stacked_queries=False))
    memory = memory_of_rank(case, 0)
    allocated = memory.total - memory.allowance + late_gradient_bytes(case, memory)
    assert allocated == pytest.approx(gib(row, "allocated_gib"), rel=0.02)


def test_fragmentation_is_the_mean_of_what_was_measured() -> None:
    shares = [float(row["reserved_gib"]) / float(row["allocated_gib"]) - 1 for row in SEGMENTS]
    assert fmean(shares) == pytest.approx(FRAGMENTATION, abs=0.001)
    assert 0.02 < min(shares) < max(shares) < 0.09


def test_what_waits_is_what_the_host_runs_ahead() -> None:
    """The measured layer has 22 kernels where nanotron's has 29: it copies no cumulative lengths."""
    errors = []
    for row in WAITING:
        case = JOBS[row["row_id"]]
        measured = replace(case, stack=replace(case.stack, layer_launches=22))
        held = gib(row, "allocated_gib") + waiting_bytes(measured, rank_contents(case, 0))
        errors.append(held * (1 + FRAGMENTATION) / gib(row, "reserved_gib") - 1)
    assert fmean(map(abs, errors)) < 0.03
    assert max(map(abs, errors)) < 0.07


@pytest.mark.parametrize("row", EXPANDABLE, ids=lambda row: row["row_id"])
def test_expandable_segments_reserve_the_named_holes(row: dict[str, str]) -> None:
    case = JOBS[row["row_id"]]
    assert reserved_bytes(case, peak_memory(case)) == pytest.approx(gib(row, "reserved_gib"), rel=0.04)


# -- by hand ------------------------------------------------------------------------------------------------


def test_two_products_of_every_layer_ahead_wait() -> None:
    case = on("nanotron", job(LLAMA, tp=2, dp=1))
    contents = rank_contents(case, 0)
    one = 2 * case.microbatch_tokens * LLAMA.hidden
    assert waiting_bytes(case, contents) == 2 * 8 * one
    slow = replace(case, stack=replace(case.stack, layer_launches=512))
    assert waiting_bytes(slow, contents) == 2 * (LAUNCH_QUEUE / 512) * one
    assert waiting_bytes(on("nanotron", job(LLAMA, dp=1)), contents) == 0
    assert waiting_bytes(job(LLAMA, tp=2, dp=1), contents) == 0


def test_late_gradients_count_where_activations_are_fewer() -> None:
    case = on("nanotron", job(LLAMA, dp=4, zero=1))
    memory = memory_of_rank(case, 0)
    gradients = 2 * rank_contents(case, 0).total
    assert late_gradient_bytes(case, replace(memory, activations=0.0)) == gradients
    assert late_gradient_bytes(case, replace(memory, activations=2.0 * gradients)) == 0
    in_buckets = on("nanotron", job(LLAMA, dp=4, zero=0))
    assert late_gradient_bytes(in_buckets, replace(memory, activations=2.0 * gradients)) == gradients
    assert late_gradient_bytes(job(LLAMA, dp=4), memory) == 0


def test_plain_segments_only_fragment() -> None:
    case = job(LLAMA, dp=1)
    memory = peak_memory(case)
    assert reserved_bytes(case, memory) == pytest.approx((memory.total - memory.allowance) * (1 + FRAGMENTATION))


def test_workspaces_by_device_and_software() -> None:
    """Two of cuBLAS, for forward and backward; one of Transformer Engine."""

    def mebibytes(cluster: str, **stack: Any) -> float:
        return workspace_bytes(replace(job(LLAMA, cluster, dp=8), stack=Stack(**stack))) / 2**20

    assert mebibytes("dgx-a100") == 2 * 8.125
    assert mebibytes("dgx-a100", deterministic=True, layers="transformer engine") == 2 * 32 + 4
    assert mebibytes("dgx-h100", layers="transformer engine") == 3 * 32
    assert mebibytes("mi300x-node") == 0
    mixture = replace(job(MOE, "dgx-h100", dp=8), stack=Stack(layers="transformer engine"))
    in_turn = replace(mixture, stack=replace(mixture.stack, experts="in turn"))
    assert workspace_bytes(mixture) - workspace_bytes(in_turn) == 4 * 32 * 2**20


def test_shards_of_whole_gradients_lie_in_a_pool_of_their_own() -> None:
    local, sharded = (
        on("torchtitan", job(LLAMA, "dgx-h100", dp=8, zero=3, accumulate=how)) for how in ("local", "sharded")
    )
    pools = [
        reserved_bytes(case, memory := peak_memory(case)) - (memory.total - memory.allowance)
        for case in (local, sharded)
    ]
    assert pools[0] - pools[1] == pytest.approx(4 * rank_contents(local, 0).total / 8)
