"""Every row of the support matrix is refused by the engine, with its reason, before there is a process group."""

from __future__ import annotations

import pytest

from shardwise.engine.engine import Engine
from shardwise.measure.verify import verify
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.support import MATRIX, Finding, verdict
from spec.test_support import using
from tables import table


@table("row", MATRIX)
def test_every_row_is_refused_with_its_reason(row: Finding) -> None:
    job = using(*row.techniques)
    with pytest.raises(SpecError) as raised:
        Engine(job)
    worst = verdict(job).findings[0]  # the row, or a worse one that its techniques bring with them
    assert row in verdict(job).findings
    assert worst.reason in str(raised.value) and worst.remedy in str(raised.value)


@table("row", MATRIX[:1])
def test_no_process_is_started_to_verify_what_is_refused(row: Finding) -> None:
    job: Job = using(*row.techniques)
    with pytest.raises(SpecError, match=row.remedy):
        verify(job, pool=None)
