"""Llama-3 8B at 131,072 tokens on 8 H100: what its memory rules out, and context against tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.cases import job_of, why_not, within
from shardwise.cost.memory.device import peak_memory
from shardwise.planner.advice.explanation import WhyNot, explain
from shardwise.planner.constraints import Allowed, allowed
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search
from shardwise.spec.strategy import Strategy

SEQ = 131_072


@cache
def planned() -> Plan:
    # Less than all that a search tries by itself: pipelines have one schedule, shard groups one size.
    constraints = within(microbatch="1", schedule="1f1b", order="tp-cp-dp-pp", zero="1..3")
    constraints = constraints.with_allowed({"shard_group": Allowed((None,))})
    found = plan(Request(job_of("llama3-8b", "dgx-h100:1", 16, seq=SEQ), constraints, offload=False))
    assert isinstance(found, Plan)
    return found


def asked(**wish: str) -> WhyNot:
    return why_not(planned(), {name: allowed(name, text) for name, text in wish.items()})


@pytest.mark.slow
def test_there_is_a_plan_that_fits() -> None:
    best = planned().best
    assert peak_memory(best.job).total <= best.job.cluster.device.memory
    assert best.job.sequences == 16
    strategy = best.job.strategy
    assert strategy.cp > 1 or strategy.tp > 1 or strategy.recompute != "none"


def test_data_parallelism_alone_is_refused_for_its_memory() -> None:
    answer = asked(tp="1", cp="1", pp="1", recompute="none")
    assert answer.verdict == "does not fit"
    request = planned().request
    alone = request.job.unchecked(strategy=Strategy(dp=8, zero=3))
    needed = peak_memory(alone).total
    assert needed > request.capacity_bytes
    # The figure is of the smallest of these, which ZeRO-3 is.
    assert f"{needed / 2**30:.0f}" in answer.reason or f"{needed / 2**30:.1f}" in answer.reason
    assert "GiB" in answer.reason


def test_offload_that_fits_the_device_but_not_its_host_says_so() -> None:
    """Activations of 131,072 tokens leave room on the device once they are off it, but not on the host."""
    request = Request(job_of("llama3-8b", "dgx-h100:1", 16, seq=SEQ), within(cp="1", tp="1", pp="1", zero="3"))
    found = plan(replace(request, constraints=request.constraints.with_allowed({"recompute": Allowed(("none",))})))
    assert isinstance(found, Search) and found.least_memory is not None
    least, cluster = found.least_memory, request.job.cluster
    assert cluster.host_memory is not None
    assert least.memory_bytes <= request.capacity_bytes
    assert least.host_bytes * cluster.node_devices > cluster.host_memory
    assert request.short_words(least.memory_bytes).endswith("per device, and more host memory than there is")


@pytest.mark.quick(2)
@pytest.mark.parametrize("wish", [{"cp": "8"}, {"cp": "2..8", "tp": "1"}, {"tp": "8", "sequence_parallel": "true"},
                                  {"tp": "2..8", "recompute": "full", "cp": "1"}])  # fmt: skip
def test_context_and_tensor_parallelism_are_both_priced(wish: dict[str, str]) -> None:
    answer = asked(**wish)
    assert answer.verdict in ("slower", "within noise", "the plan itself", "does not fit")
    if answer.best is not None:
        assert answer.loss is not None and answer.loss > -0.006
        assert answer.best.job.training.seq == SEQ


@pytest.mark.slow
def test_the_reasons_set_context_against_tensor_parallelism() -> None:
    """The better of the two is named against the other by what each sends and computes again."""
    context, tensor = asked(cp="2..8", tp="1"), asked(tp="2..8", cp="1", recompute="full")
    assert context.best is not None and tensor.best is not None
    assert context.best.parts["cp"] > 0 == context.best.parts["tp"]
    assert tensor.best.parts["tp"] > 0 == tensor.best.parts["cp"]
    assert tensor.best.parts["recompute"] > 0
    slower = max((context, tensor), key=lambda one: one.loss or 0.0)
    assert slower.verdict == "slower"
    assert any(f"{part} +" in slower.reason or f"{part} -" in slower.reason for part in ("cp", "tp", "recompute"))


def test_the_explanation_names_another_layout_and_what_would_turn_the_choice() -> None:
    told = explain(planned())
    assert told.second is not None
    assert told.second.degrees != told.first.degrees
    assert told.loss >= -0.006
    assert any(part in told.differences for part in ("cp", "tp", "recompute", "compute", "dp", "bubble"))
    sentence = told.sentence()
    assert "\n" not in sentence
    assert any(words in sentence for words in ("it would win with", "would reverse that", "within noise"))
