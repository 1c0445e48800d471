"""Bytes that a rank holds between microbatches and for the optimizer: those of its ZeRO stage, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.data_cases import UNEVEN, Case, Trained, together
from engine.workers import on_ranks
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.models import Decoder
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


def test_hybrid_sharding_holds_the_part_of_its_group() -> None:
    strategy = Strategy(dp=4, zero=3, shard_group=2)
    for found in on_ranks(4, together, Case(strategy, EVEN, microbatches=3, steps=2)):
        assert found.notes["optimizer"] == PARAMETERS * 8 / 2
        assert found.notes["bytes"][0]["weights"] == PARAMETERS * 4 / 2
