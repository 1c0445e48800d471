"""Weights that ZeRO-3 gathers in FP8: the numbers of one process, half the bytes, no memory of wide weights."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from engine.fp8.cases import counts, job_of, trained, wide_bytes_in_use
from engine.workers import on_ranks
from shardwise.cost.traffic.data import data_traffic
from shardwise.layout.payloads import Role
from shardwise.layout.stages import rank_contents
from shardwise.measure.dryrun.run import dry_run
from shardwise.spec import Job

CLOSE = 1e-4  # losses after an update: gradients are rounded to bf16 before they are summed, and on one rank are not

HALF_A_ROUNDING = 2.0**-9  # of bf16, in which the gradients are summed: their norm after an update


@cache
def alone(precision: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    (found,) = on_ranks(1, trained, job_of(precision))
    return found  # type: ignore[no-any-return]


@pytest.mark.quick(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp8", "fp8-blockwise"])
def test_gathered_weights_are_the_numbers_of_whole_ones(precision: str, recompute: str) -> None:
    """Shards of 64 rows end within blocks of 128, and a tensor's largest element is on one rank."""
    losses, norms, _ = alone(precision)
    for found in on_ranks(2, trained, job_of(precision, 2, dp=2, zero=3, recompute=recompute)):
        assert found[0][0] == losses[0]
        assert found[0] == pytest.approx(losses, rel=CLOSE)
        assert found[1] == pytest.approx(norms, rel=HALF_A_ROUNDING)


@pytest.mark.slow
def test_shards_of_unequal_size() -> None:
    """128 rows over 3 ranks: the last has fewer, which are padded on their way."""
    divided, whole = (
        on_ranks(3, trained, job_of("fp8-blockwise", 3, dp=3, zero=zero, global_batch=12)) for zero in (3, 0)
    )
    for found, expected in zip(divided, whole):
        assert found[0][0] == expected[0][0]
        assert found[0] == pytest.approx(expected[0], rel=CLOSE)


def test_tensor_parallel_ranks_scale_alike() -> None:
    losses, norms, _ = alone("fp8")
    for found in on_ranks(4, trained, job_of("fp8", 4, dp=2, tp=2, zero=3)):
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=2e-2)


@pytest.mark.slow
def test_what_is_gathered_in_fp8_is_not_cast_again() -> None:
    """Rows and columns have scales of their own: both forms would be as many bytes as bf16, which is gathered."""
    for precision, casts in (("fp8", 0), ("fp8-blockwise", 0), ("fp8-rowwise", 2 * 4 * 2)):
        for first, _ in on_ranks(2, counts, job_of(precision, 2, dp=2, zero=3)):
            assert first[0] == casts


def test_gathered_weights_have_no_wide_memory() -> None:
    for in_fp8, in_bf16 in zip(
        on_ranks(2, wide_bytes_in_use, job_of("fp8", 2, dp=2, zero=3)),
        on_ranks(2, wide_bytes_in_use, job_of("bf16", 2, dp=2, zero=3)),
    ):
        assert in_fp8 == 0 < in_bf16


def _gathered(job: Job) -> float:
    lines = data_traffic(job, rank_contents(job, 0))
    return sum(one.size_bytes * one.count for one in lines if one.payload.role is Role.PARAMETERS)


def test_half_the_bytes_are_sent_and_priced() -> None:
    """But for embedding and head, which stay in bf16."""
    jobs = {one: job_of(one, 2, dp=2, zero=3, model={"layers": 8}) for one in ("bf16", "fp8", "fp8-rowwise")}
    planned = {one: _gathered(job) for one, job in jobs.items()}
    assert planned["fp8-rowwise"] == planned["bf16"]
    assert 0.5 < planned["fp8"] / planned["bf16"] < 0.54
    found = dry_run(jobs["fp8"])
    assert not found.defects
