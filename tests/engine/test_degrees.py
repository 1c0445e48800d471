"""Dimensions of four and eight ranks, which do more than pairs do, against the single process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.layouts import job_of, model_named
from engine.parity import check
from shardwise.spec.model import Model

EXPERTS = {"dp": 4, "ep": 4, "expert_tp": 1}
# Name → model and strategy. Two key-value heads on four ranks are repeated; eight layers are two chunks on each of 4.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp-4": ("tiny", {"tp": 4}),
    "tp-4-plain": ("tiny-moe", {"tp": 4, "sequence_parallel": False}),
    "tp-4-repeated-heads": ("two-key-heads", {"tp": 4, "dp": 2, "zero": 2}),
    "tp-4-repeated-heads-ulysses": ("two-key-heads", {"tp": 4, "cp": 2, "context_method": "ulysses"}),
    "tp-8-repeated-heads": ("two-key-heads", {"tp": 8}),
    "cp-4-ring": ("tiny", {"cp": 4, "context_method": "ring", "zero": 3}),
    "cp-4-all-gather": ("tiny-mla", {"cp": 4, "context_method": "all-gather", "zero": 1}),
    "cp-4-ulysses": ("tiny", {"cp": 4, "context_method": "ulysses", "dp": 2, "zero": 2}),
    "cp-8-ring-repeated-chunks": ("tiny", {"cp": 8, "context_method": "ring"}),
    "ulysses-beyond-key-heads": ("two-key-heads", {"cp": 4, "context_method": "ulysses"}),
    "ep-4": ("tiny-moe", {**EXPERTS, "zero": 1}),
    "ep-4-deduplicated": ("tiny-mla", {**EXPERTS, "dispatch": "deduplicated", "zero": 2}),
    "ep-8-deduplicated": ("tiny-moe", {"dp": 8, "ep": 8, "dispatch": "deduplicated"}),
    "ep-4-over-tp": ("tiny-mla", {"tp": 2, "dp": 4, "zero": 3, "ep": 4, "expert_tp": 1}),
    "ep-4-expert-tp": ("tiny-moe", {"tp": 2, "dp": 4, "ep": 4, "expert_tp": 2}),
    "zero-1-of-8": ("tiny", {"dp": 8, "zero": 1}),
    "zero-3-of-8": ("tied-gpt", {"dp": 8, "zero": 3}),
    "hybrid-4-of-8": ("tiny-moe", {"dp": 8, "zero": 3, "shard_group": 4, "ep": 2}),
    **{f"pp-4-{name}": ("eight-layers", {"pp": 4, "schedule": name}) for name in ("gpipe", "zb-h1", "zb-2p", "zbv")},
    "pp-4-interleaved": ("eight-layers", {"pp": 4, "schedule": "interleaved", "interleave": 2, "recompute": "full"}),
    "pp-4-v-half-data": ("eight-layers", {"pp": 4, "schedule": "v-half", "dp": 2, "zero": 2}),
    "pp-4-dualpipev-tp": ("eight-layers", {"pp": 4, "schedule": "dualpipev", "tp": 2}),
    "pp-3-uneven": ("eight-layers", {"pp": 3, "schedule": "1f1b", "stage_layers": (2, 4, 2)}),
    "tied-pp-4": ("tied-gpt", {"pp": 4, "schedule": "1f1b", "dp": 2, "zero": 1}),
}  # fmt: skip
QUICK = ("tp-4-repeated-heads", "pp-4-zbv")


def changed(name: str) -> Model:
    tiny = replace(model_named("tiny"), published_parameters=None)
    if name == "two-key-heads":
        return replace(tiny, kv_heads=2)
    return replace(tiny, layers=8) if name == "eight-layers" else model_named(name)


@pytest.mark.slow
@pytest.mark.parametrize("case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES])
def test_larger_degrees_equal_one_process(case: str) -> None:
    name, fields = CASES[case]
    job = job_of(changed(name), fields, microbatches=8 if fields.get("pp") == 4 else 3)
    assert job is not None
    check(job)
