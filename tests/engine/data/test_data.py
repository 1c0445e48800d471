"""Data parallelism against one process: losses, gradients, gradient norm, weights after three clipped AdamW steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.data.cases import MIXTURE, TIED, UNEVEN, Case, Trained, alone, deviation, together
from engine.workers import on_ranks
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy

STAGES: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 2 local": {"zero": 2, "accumulate": "local"},
    "zero 3": {"zero": 3},
    "zero 3 kept": {"zero": 3, "keep_parameters": True},
    "zero 3 local": {"zero": 3, "accumulate": "local"},
    "zero 3 kept local": {"zero": 3, "keep_parameters": True, "accumulate": "local"},
}
MODELS = {"uneven": UNEVEN, "tied": TIED, "mixture": MIXTURE}


@cache
def reference(model: Model, frozen: tuple[str, ...]) -> Trained:
    return alone(Case(Strategy(), model=model, frozen=frozen))


def check(case: Case) -> list[Trained]:
    expected = reference(case.model, case.frozen)
    results: list[Trained] = on_ranks(case.strategy.world, together, case)
    for found in results:
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        parts = found.notes["parts"]
        assert set(found.gradients) == set(expected.gradients)
        for name, gradient in expected.gradients.items():
            assert deviation(found.gradients[name], parts[name].of(gradient)) < 1e-5, name
        for name, weight in expected.weights.items():
            assert deviation(found.weights[name], parts[name].of(weight)) < 1e-5, name
    return results


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", STAGES)
def test_three_microbatches_on_two_ranks(stage: str) -> None:
    check(Case(Strategy(dp=2, **STAGES[stage]), microbatches=3))


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", ["zero 0", "zero 1", "zero 3"])
def test_one_microbatch_on_four_ranks(stage: str) -> None:
    check(Case(Strategy(dp=4, **STAGES[stage])))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero 1", "zero 2", "zero 3 local"])
def test_hybrid_sharding(stage: str) -> None:
    check(Case(Strategy(dp=4, shard_group=2, **STAGES[stage]), microbatches=3))


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", ["zero 0", "zero 2", "zero 3"])
def test_tied_embeddings(stage: str) -> None:
    check(Case(Strategy(dp=2, **STAGES[stage]), model=TIED, microbatches=2))


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", ["zero 0", "zero 3"])
def test_frozen_parameters_stay(stage: str) -> None:
    """The embedding, so that the first layer's input needs no gradient, and one matrix among trained ones."""
    frozen = ("embedding", "layers.1.mlp.up")
    for found in check(Case(Strategy(dp=2, **STAGES[stage]), frozen=frozen, microbatches=2)):
        assert not any(name.startswith(frozen) for name in found.gradients)


@pytest.mark.parametrize("stage", ["zero 0", "zero 2"])
def test_a_module_without_values_gets_them_later(stage: str) -> None:
    check(Case(Strategy(dp=2, **STAGES[stage]), on_meta=True))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero 0", "zero 1", "zero 3"])
def test_experts_have_ranks_of_their_own(stage: str) -> None:
    check(Case(Strategy(dp=4, ep=2, **STAGES[stage]), model=MIXTURE))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("shard_group", [None, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_everything_on_four_ranks(stage: str, model: str, shard_group: int | None, microbatches: int) -> None:
    strategy = Strategy(dp=4, shard_group=shard_group, ep=2 if model == "mixture" else 1, **STAGES[stage])
    if strategy.zero == 0 and shard_group:
        return
    check(Case(strategy, model=MODELS[model], microbatches=microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_as_many_ranks_as_rows(stage: str) -> None:
    """Some ranks hold nothing of a parameter."""
    check(Case(Strategy(dp=4, **STAGES[stage]), model=replace(UNEVEN, hidden=6, heads=3, ffn=5), microbatches=3))
