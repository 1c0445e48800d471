"""What our engine does not run: a plan for it says so, and a plan for others prices it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.running import run
from planner.cases import job_of, within
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.supported import model_note
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from
from shardwise.spec.support import verdict

NARROW = within(microbatch="1", pp="1,2", cp="1", zero="1", schedule="1f1b,dualpipev")


def job(**training: object) -> Job:
    return job_of("llama3.2-1b", "dgx-h100:1", 64, seq=2048, **training)


@pytest.mark.slow
@pytest.mark.parametrize("training", [{"precision": "int8"}, {"precision": "nvfp4"}, {"dropout": True}])
def test_what_the_training_asks_for_is_refused_and_priced_if_asked(training: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"this engine has no|our attention kernels do not") as caught:
        Request(job(**training), NARROW)
    assert caught.value.field.startswith("training.") and "⟨any_priced=true⟩" in caught.value.remedy
    for request in (
        Request(job(**training), NARROW, any_priced=True),
        Request(job(**training).unchecked(stack=stack_from("megatron-core")), NARROW),
    ):
        assert isinstance(plan(request), Plan)


@pytest.mark.slow
def test_a_plan_for_our_engine_hides_nothing_that_it_does_not_hide() -> None:
    asked = Request(job_of("mixtral-8x7b", "dgx-h100:2", 64, seq=2048), NARROW)
    for request, hides in ((asked, False), (replace(asked, any_priced=True), True)):
        found = plan(request)
        assert isinstance(found, Plan)
        assert any(one.job.strategy.overlap.ep for one in found.candidates) == hides
        assert hides or all(verdict(one.job).status == "runs" for one in found.candidates)


def test_a_model_that_is_not_built_is_priced_with_a_note() -> None:
    one = job()
    assert model_note(one) is None
    other = one.unchecked(model=replace(one.model, norms_per_layer=3, published_parameters=None))
    assert "(norms_per_layer: 2 would run)" in (model_note(other) or "")
    assert model_note(other.unchecked(stack=stack_from("megatron-core"))) is None
    assert isinstance(plan(Request(other, NARROW)), Plan)


@pytest.mark.parametrize("verb", ["plan --out -", "train --steps 1", "verify", "dryrun"])
def test_mxfp8_is_refused_in_one_line(verb: str) -> None:
    command = f"{verb} --model tiny --cluster laptop:2 --seq 64 --global-batch 4 --precision mxfp8"
    found = run(*command.split())
    assert found.status == 2 and "--precision: mxfp8: block-scaled matmuls need Blackwell" in found.err
    assert found.out == "" and len(found.err.strip().splitlines()) == 1
