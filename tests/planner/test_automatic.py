"""What a job leaves open: the largest microbatch that fits, and offload only where the smallest does not."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.cost.memory.device import peak_memory
from shardwise.planner.automatic import decided, ways_to_fit
from shardwise.spec import Job
from shardwise.spec.errors import SpecError


def job(model: str = "llama3-8b", **strategy: Any) -> Job:
    training = {"global_batch": 64, "seq": 8192}
    return Job.from_dict({"model": model, "cluster": "dgx-a100:1", "strategy": strategy, "training": training})


def test_a_job_that_leaves_nothing_open_is_as_it_was() -> None:
    one = job(dp=8, zero=3)
    assert decided(one) is one


def test_the_largest_microbatch_that_fits() -> None:
    one = job(dp=8, zero=3, microbatch="auto", recompute="full")
    assert one.run.automatic == ("microbatch",) and one.strategy.microbatch == 1
    found = decided(one)
    memory = found.cluster.device.memory
    assert peak_memory(found).total <= memory
    assert found.strategy.microbatch > 1 and found.sequences == one.sequences
    larger = 2 * found.strategy.microbatch
    assert larger > 8 or peak_memory(found.with_strategy(microbatch=larger)).total > memory


def test_ways_need_less_and_less() -> None:
    needed = [peak_memory(one).total for one in ways_to_fit(job(dp=8, zero=3, microbatch="auto", recompute="full"))]
    assert needed == sorted(needed, reverse=True) and len(needed) > 1


def test_offload_is_the_least_that_fits() -> None:
    found = decided(job("llama3-70b", dp=8, zero=3, offload="auto", recompute="full")).strategy.offload
    assert found.optimizer == 1 and found.activations == 0
    assert decided(job(dp=8, zero=3, offload="auto", recompute="full")).strategy.offload.any is False


def test_only_the_kind_that_was_asked_for() -> None:
    one = job(dp=8, zero=1, offload={"optimizer": "auto", "activations": 0.5})
    assert one.run.automatic == ("optimizer",) and one.strategy.offload.activations == 0.5
    assert decided(one).strategy.offload.activations == 0.5


def test_a_job_file_keeps_what_was_asked_and_what_was_found() -> None:
    found = decided(job(dp=8, zero=3, microbatch="auto", offload="auto", recompute="full"))
    assert Job.from_yaml(found.to_yaml()) == found
    assert set(found.run.automatic) == {"microbatch", "optimizer", "gradients", "weights", "activations"}


def test_another_word_is_refused() -> None:
    with pytest.raises(SpecError, match="microbatch"):
        job(dp=8, microbatch="automatic")
