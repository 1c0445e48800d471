"""`shardwise.parallelize`: networks that others wrote compute what they compute in one process, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from engine.own_model.networks import Case, compare, summed_loss
from engine.workers import on_ranks

TOLERANCE = 1e-5
SP, PLAIN = {"tp": 2}, {"tp": 2, "sequence_parallel": False}
ULYSSES, ALL_GATHER = {"cp": 2, "context_method": "ulysses"}, {"cp": 2, "context_method": "all-gather"}
ZBV = {"pp": 2, "schedule": "zbv"}
INTERLEAVED = {"pp": 2, "schedule": "interleaved", "interleave": 2}
HYBRID = {"dp": 4, "shard_group": 2}


def check(case: Case, loss: Any = None) -> None:
    found = on_ranks(case.strategy.world, compare, case, loss, timeout_seconds=300)
    worst = {kind: max(one[kind] for one in found) for kind in found[0]}
    assert all(one.value <= TOLERANCE for one in worst.values()), worst


def named(case: Case) -> str:
    return "-".join([case.network, *(f"{name}{value}" for name, value in case.fields.items())])


ANY_MODULE = [
    *(Case("perceptron", {"dp": 2, "zero": zero}) for zero in range(4)),
    Case("perceptron", {"dp": 2, "zero": 3, "recompute": "full", "microbatch": 2}),
    Case("perceptron", {**HYBRID, "zero": 3}),
]
ONE_DIMENSION = [
    Case("llama", {"dp": 2}),
    Case("llama-tied", {"dp": 2, "zero": 3}),
    Case("llama", PLAIN),
    Case("llama-tied", SP),
    Case("llama", {"pp": 2}, 4),
    Case("llama-tied", ZBV, 4),
    Case("llama", {"cp": 2}),
    Case("qwen3", ULYSSES),
    Case("qwen3", SP),
    Case("mixtral", {"dp": 2, "ep": 2}),
    Case("mixtral", SP),
    Case("qwen2-moe", SP),
    Case("writer", SP),
    Case("writer", {"pp": 2}),
    Case("writer", {"cp": 2}),
]
FAMILIES = [
    Case("olmo", SP),
    Case("olmo2", SP),
    Case("olmo2", PLAIN),
    Case("phi", SP),
    Case("neox", SP),
    Case("neox", {"pp": 2}, 4),
    Case("gpt2", PLAIN),
    Case("phi3", SP),
    Case("phi3", {"dp": 2, "zero": 3}),
    Case("gemma2", SP),
    Case("gemma2", {"dp": 2}),
    Case("gemma3", SP),
    Case("gemma3", {"pp": 2}, 4),
]
ON_FOUR = [
    Case("llama-tied", {**SP, "pp": 2}, 4),
    Case("mixtral", {**SP, "dp": 2, "ep": 2, "zero": 3}),
    Case("qwen3", {**SP, "cp": 2, "recompute": "full"}),
]
MORE = [
    *(Case(name, {"dp": 2, "zero": zero}) for name in ("gpt2", "phi3", "gemma2", "gemma3") for zero in (0, 1, 2, 3)),
    Case("gpt2", {"cp": 2}),
    Case("gpt2", {**PLAIN, "dp": 2, "zero": 3}),
    Case("phi3", PLAIN),
    Case("phi3", {**SP, "pp": 2, "recompute": "full"}, 4),
    Case("phi3", {**SP, "dp": 2, "zero": 3}),
    Case("phi3", ULYSSES),
    Case("gemma", SP),
    Case("gemma", {"pp": 2}, 4),
    Case("gemma2", PLAIN),
    Case("gemma2", ULYSSES),
    Case("gemma2", {**SP, "pp": 2}, 4),
    Case("gemma2", {**SP, "dp": 2, "zero": 3}),
    Case("gemma3", ULYSSES),
    Case("gemma3", ALL_GATHER),
    Case("gemma3", {"tp": 4}),  # more ranks than key-value heads
    Case("gemma3", ZBV, 4),
    Case("gemma3", {**INTERLEAVED, "dp": 2, "zero": 3}, 4),
    *(Case("llama", {"dp": 2, "zero": zero}) for zero in (1, 2, 3)),
    Case("llama", {**HYBRID, "zero": 2}),
    Case("llama", {"tp": 4}),  # more ranks than key-value heads
    Case("qwen2", {**SP, "dp": 2, "zero": 2}),
    Case("qwen3", PLAIN),
    Case("qwen3", {**INTERLEAVED, "dp": 2, "zero": 3}, 4),
    Case("llama", {**SP, "recompute": "selective", "recompute_operators": ("norm",)}),
    Case("llama", ALL_GATHER),
    Case("mistral-window", ULYSSES),
    Case("mistral-window", {"dp": 2, "pp": 2}),
    Case("llama", {"cp": 2, "pp": 2}),
    Case("llama", {"cp": 2, "dp": 2, "zero": 1}),
    Case("mixtral", {"dp": 2, "zero": 3}),
    Case("mixtral", PLAIN),
    Case("mixtral", {**SP, "expert_tp": 1}),
    Case("mixtral", {**SP, "ep": 2, "expert_tp": 1}),
    Case("mixtral", {"cp": 2, "ep": 2}),
    Case("mixtral", {"dp": 2, "ep": 2, "pp": 2, "zero": 1}),
    Case("mixtral", {"dp": 4, "ep": 2, "dispatch": "deduplicated", "recompute": "full"}),
    Case("qwen2-moe", PLAIN),
    Case("qwen2-moe", {"dp": 2, "ep": 2, "zero": 3}),
    Case("qwen2-moe", {**SP, "ep": 2, "expert_tp": 1, "recompute": "full"}),
    Case("qwen3-moe", {**SP, "dp": 2, "ep": 2}),
    Case("writer", {**SP, "pp": 2}, 4),
    Case("writer", {**SP, "cp": 2}),
    Case("writer", {**ZBV, "dp": 2, "zero": 1}, 4),
    Case("writer", {**ULYSSES, "dp": 2, "zero": 3}),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", [*ANY_MODULE, *ONE_DIMENSION, *FAMILIES, *ON_FOUR], ids=named)
def test_it_equals_the_plain_loop(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=named)
def test_so_do_other_layouts(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("llama", {**SP, "cp": 2}), Case("writer", {"pp": 2})], ids=named)
def test_a_loss_of_the_users_own_sees_logits_wherever_they_are(case: Case) -> None:
    check(case, summed_loss)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("gpt2", PLAIN), Case("gemma2", SP)], ids=named)
def test_it_sees_logits_of_other_families_as_they_are(case: Case) -> None:
    check(case, summed_loss)


UNKNOWN = [Case("olmo", {"dp": 2}), Case("phi", {"dp": 2, "zero": 3}), Case("stablelm", {"dp": 2, "zero": 2})]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", UNKNOWN, ids=named)
def test_data_parallelism_asks_nothing_about_a_network_with_a_loss_of_its_own(case: Case) -> None:
    check(case, summed_loss)
