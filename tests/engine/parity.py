"""One job against the single process, on the session's pool of workers."""

from __future__ import annotations

import tempfile
from functools import cache

from engine.workers import pool
from shardwise.measure.verify import Verification, verify
from shardwise.spec.job import Job


def check(job: Job, tolerance: float = 1e-5, steps: int = 3) -> Verification:
    found = verify(job, steps=steps, pool=pool(), tolerance=tolerance, references=references())
    assert found.ok, {kind: (one.value, one.where) for kind, one in found.worst.items()}
    return found


def references() -> str:
    """A folder for this session: the single process runs each of the few jobs that many layouts have only once."""
    return _folder().name


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shardwise-references-")
