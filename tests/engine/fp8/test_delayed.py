"""Delayed scaling: histories of the largest elements, equal on all ranks, noted by training alone."""

from __future__ import annotations

import torch

from engine.fp8.cases import histories_here, job_of, trained
from engine.workers import on_ranks
from shardwise.engine.fp8.linear import GRADIENTS, HISTORY, INPUTS, DelayedScaling
from shardwise.spec.support import verdict
from shardwise.spec.training import Training


def test_a_tensor_is_cast_by_the_largest_of_earlier_steps() -> None:
    """In the first step by its own; a larger one later changes nothing before the next step."""
    scaling = DelayedScaling(1, torch.device("cpu"))
    largest, used = scaling.of(0), []
    for step, own in enumerate((3.0, 5.0, 2.0, 1.0)):
        scaling.begin_step()
        used.append(float(largest(INPUTS, torch.tensor(own))))
        if step == 1:
            assert float(largest(INPUTS, torch.tensor(99.0), False)) == 3.0  # an evaluation
        scaling.end_step([])
    assert used == [3.0, 3.0, 5.0, 5.0]
    assert scaling.history[0, INPUTS, :4].tolist() == [1.0, 2.0, 5.0, 3.0]
    assert not scaling.history[0, GRADIENTS].any()


def test_a_step_that_is_not_finite_leaves_no_trace() -> None:
    scaling = DelayedScaling(1, torch.device("cpu"))
    largest = scaling.of(0)
    scaling.begin_step()
    largest(GRADIENTS, torch.tensor(torch.inf))
    scaling.end_step([])
    assert not scaling.history.any()


def test_histories_end() -> None:
    scaling = DelayedScaling(1, torch.device("cpu"))
    largest = scaling.of(0)
    for step in range(HISTORY + 1):
        scaling.begin_step()
        largest(INPUTS, torch.tensor(7.0 if step == 0 else 2.0))
        scaling.end_step([])
    scaling.begin_step()
    assert float(scaling.kept[0, INPUTS]) == 2.0


def test_the_first_step_is_that_of_current_scaling_and_later_ones_follow_it() -> None:
    ((losses, norms, _),) = on_ranks(1, trained, job_of("fp8"), 3)
    ((found, found_norms, _),) = on_ranks(1, trained, job_of("fp8-delayed"), 3)
    assert found[0] == losses[0] and found_norms[0] == norms[0]
    assert found[2] != losses[2]
    assert all(abs(one - other) < 0.01 * other for one, other in zip(found, losses))


def test_all_ranks_have_the_histories_of_one_process() -> None:
    ((expected, losses),) = on_ranks(1, histories_here, job_of("fp8-delayed"))
    assert (expected[:, :, :2] > 0).all() and not expected[:, :, 2:].any()
    for layout in ({"dp": 2, "zero": 3}, {"tp": 2}):
        first, second = on_ranks(2, histories_here, job_of("fp8-delayed", 2, **layout))
        assert torch.equal(first[0], second[0])
        # To a step of FP8: ZeRO-3 rounds gradients to bf16, one process does not.
        torch.testing.assert_close(first[0], expected, rtol=1 / 8, atol=1e-6)
        torch.testing.assert_close(torch.tensor(first[1]), torch.tensor(losses), rtol=1e-3, atol=0)


def test_it_is_not_compiled() -> None:
    job = job_of("fp8-delayed")
    assert verdict(job).status == "runs"
    compiled = Training.from_dict({**job.training.to_dict(), "compile": True})
    found = verdict(type(job)(model=job.model, cluster=job.cluster, strategy=job.strategy, training=compiled))
    assert found.status != "runs" and "recorded between kernels" in str(found)
