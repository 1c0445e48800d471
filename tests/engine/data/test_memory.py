"""Bytes that a rank holds between microbatches and for the optimizer: those of its ZeRO stage, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.data.cases import UNEVEN, Case, Trained, held_bytes, together
from engine.workers import on_ranks
from shardwise.cost.memory.states import group_states
from shardwise.engine.engine import Engine
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.reference import sample_batch
from shardwise.models import Decoder
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

# Sizes that divide, so that no padding hides a mistake.
EVEN = replace(UNEVEN, hidden=16, heads=4, kv_heads=4, ffn=32, vocab=64, norm_bias=False, attention_out_bias=False)
PARAMETERS = sum(one.numel() for one in Decoder(EVEN).parameters())
MIXED = Precision(torch.bfloat16, torch.float32)
HALF = Precision(torch.bfloat16, torch.bfloat16)

# Stage → bytes per parameter between two microbatches on 2 ranks: weights, gradients; and for the optimizer.
EXPECTED = [
    ("zero 0", Strategy(dp=2), FP32, 4, 4, 8),
    ("zero 1", Strategy(dp=2, zero=1), FP32, 4 + 4 / 2, 4, 8 / 2),
    ("zero 2", Strategy(dp=2, zero=2), FP32, 4 + 4 / 2, 4 / 2, 8 / 2),
    ("zero 2 local", Strategy(dp=2, zero=2, accumulate="local"), FP32, 4 + 4 / 2, 4, 8 / 2),
    ("zero 3", Strategy(dp=2, zero=3), FP32, 4 / 2, 4 / 2, 8 / 2),
    ("zero 3 local", Strategy(dp=2, zero=3, accumulate="local"), FP32, 4 / 2, 4, 8 / 2),
    ("zero 3 kept", Strategy(dp=2, zero=3, keep_parameters=True), FP32, 4 + 4 / 2, 4 / 2, 8 / 2),
    ("zero 0, bf16", Strategy(dp=2), HALF, 2, 2, 12),
    ("zero 0, bf16, fp32 gradients", Strategy(dp=2), MIXED, 2, 4, 12),
    ("zero 1, bf16", Strategy(dp=2, zero=1), HALF, 2 + 4 / 2, 2, 8 / 2),
    ("zero 1, bf16, fp32 gradients", Strategy(dp=2, zero=1), MIXED, 2 + 4 / 2, 4, 8 / 2),
    ("zero 2, bf16", Strategy(dp=2, zero=2), HALF, 2 + 4 / 2, 4 / 2, 8 / 2),
    ("zero 3, bf16", Strategy(dp=2, zero=3), HALF, 4 / 2, 4 / 2, 8 / 2),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("strategy", "precision", "weights", "gradients", "optimizer"),
    [one[1:] for one in EXPECTED],
    ids=[one[0] for one in EXPECTED],
)
def test_a_rank_holds_what_its_stage_says(
    strategy: Strategy, precision: Precision, weights: float, gradients: float, optimizer: float
) -> None:
    results: list[Trained] = on_ranks(2, together, Case(strategy, EVEN, microbatches=3, steps=2, precision=precision))
    for found in results:
        assert found.notes["optimizer"] == PARAMETERS * optimizer
        for held in found.notes["bytes"][:-1]:
            assert held["gradients"] == PARAMETERS * gradients
            assert held["weights"] == PARAMETERS * weights


@pytest.mark.slow
def test_hybrid_sharding_holds_the_part_of_its_group() -> None:
    strategy = Strategy(dp=4, zero=3, shard_group=2)
    for found in on_ranks(4, together, Case(strategy, EVEN, microbatches=3, steps=2)):
        assert found.notes["optimizer"] == PARAMETERS * 8 / 2
        assert found.notes["bytes"][0]["weights"] == PARAMETERS * 4 / 2


def mixture(strategy: dict[str, Any]) -> Job:
    model = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64, "activation": "swiglu", "norm": "rmsnorm",
             "moe": {"experts": 4, "top_k": 2, "ffn": 64}}  # fmt: skip
    training = {"seq": 16, "global_batch": 4 * strategy["dp"], "precision": "bf16"}
    cluster = f"laptop:{strategy['dp'] * strategy.get('pp', 1)}"
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": strategy, "training": training})


def gradients_held(texts: Sequence[str]) -> list[tuple[int, int]]:
    return [held_before_the_last(Job.from_yaml(text)) for text in texts]


def held_before_the_last(job: Job) -> tuple[int, int]:
    """This rank's place in the pipeline, and the bytes of its gradients before its last microbatch."""
    engine = Engine(job)
    ((stage, part),) = engine.data.parts.items()
    held, begin = [], part.before_microbatch

    def begin_and_note(last: bool) -> None:
        held.append(held_bytes(stage)["gradients"])
        begin(last)

    part.before_microbatch = begin_and_note  # type: ignore[method-assign]
    engine.step(sample_batch(job, 0, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    return engine.mesh.pipeline_rank, held[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 2, "pp": 2},
        {"dp": 4, "ep": 2},
        {"dp": 4, "ep": 2, "shard_group": 2},
        pytest.param({"dp": 4, "ep": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 2, "pp": 2, "shard_group": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_of_experts_are_as_priced_and_no_more_at_a_higher_stage(layout: dict[str, Any]) -> None:
    jobs = [mixture({**layout, "zero": zero, "accumulate": "sharded"}) for zero in (1, 2, 3)]
    for ranks in on_ranks(jobs[0].strategy.world, gradients_held, [job.to_yaml() for job in jobs]):
        held = [size for _, size in ranks]
        for job, (place, size) in zip(jobs, ranks):
            groups = group_states(rank_contents(job, place), sharding_of(job.strategy), job.recipe, "adamw")
            assert size == sum(one.gradients for one in groups.values())
        assert held == sorted(held, reverse=True)
