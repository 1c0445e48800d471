"""The least offload that fits: optimizer states first, activations last, else one line that says why not."""

from __future__ import annotations

import pytest

from shardwise.cost.memory.device import peak_memory
from shardwise.planner.automatic import STEPS, smallest_offload
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

JOB = Job.from_dict(
    {"model": "llama3-8b", "cluster": "dgx-a100:1", "strategy": {"dp": 8, "zero": 1}, "training": {"seq": 8192}}
)
WHOLE = peak_memory(JOB).total
STATES = peak_memory(JOB.with_strategy(offload={"optimizer": 1})).total


def test_nothing_is_offloaded_where_it_fits() -> None:
    assert smallest_offload(JOB, WHOLE).strategy == JOB.strategy


def test_one_sixteenth_less_would_not_fit() -> None:
    limit = (WHOLE + STATES) / 2
    found = smallest_offload(JOB, limit)
    share = found.strategy.offload.optimizer
    assert 0 < share < 1 and found.strategy.offload.activations == 0
    assert peak_memory(found).total <= limit
    assert peak_memory(JOB.with_strategy(offload={"optimizer": share - 1 / STEPS})).total > limit


def test_activations_follow() -> None:
    found = smallest_offload(JOB, STATES - 2**30).strategy.offload
    assert found.optimizer == 1 and 0 < found.activations < 1


def test_gradients_and_weights_go_where_zero_has_divided_them() -> None:
    divided = JOB.with_strategy(zero=3)
    states = peak_memory(divided.with_strategy(offload={"optimizer": 1, "gradients": 1})).total
    found = smallest_offload(divided, states - 2**28).strategy.offload
    assert found.optimizer == found.gradients == 1 and 0 < found.weights < 1 and found.activations == 0


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="a device needs"):
        smallest_offload(JOB, 2**30)
