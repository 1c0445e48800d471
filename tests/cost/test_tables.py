"""A table of strategies prices each of them as `predict` and `peak_memory` do, and as a table of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from cost.jobs import valid_jobs
from shardwise.cost.memory import device_memories, peak_memory
from shardwise.cost.prediction import predict
from shardwise.cost.tables.group import group_of
from shardwise.cost.tables.price import TablePricer
from shardwise.spec.job import Job


def table_of(job: Job) -> tuple[float, float, float]:
    """Step seconds, device bytes and host bytes by a table of one row and one column."""
    (piece,) = TablePricer(job).pieces([group_of(job)])
    assert piece.strategy(0, 0) == job.strategy
    return float(piece.step_seconds.item()), float(piece.memory_bytes.item()), float(np.max(piece.host_bytes))


@settings(max_examples=400, deadline=None)
@given(valid_jobs())
def test_a_table_of_one_equals_the_job(job: Job) -> None:
    seconds, memory, host = table_of(job)
    assert seconds == pytest.approx(predict(job).step_seconds, rel=1e-9)
    assert memory == pytest.approx(peak_memory(job).total, rel=1e-9)
    assert host == pytest.approx(max(one.host for one in device_memories(job)), rel=1e-9, abs=1e-3)
