"""Writes the job file that a run's processes read, and its predicted cost; again whenever the layout changes."""

from __future__ import annotations

from shardwise.planner.candidate import Candidate, candidate
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.recorder import write_prediction
from shardwise.spec.job import Job


def write_job(job: Job, folder: RunFolder, price: Candidate | None = None) -> None:
    """Replaces the job file atomically; ``price`` is computed unless it is given."""
    temporary = folder.job.with_suffix(".part")
    temporary.write_text(job.to_yaml(), encoding="utf-8")
    temporary.replace(folder.job)
    memory = (price := price or candidate(job)).memory
    # What a run measures is its tensors, without the framework's own memory.
    write_prediction(folder.path, price.step_seconds, memory.total - memory.allowance)
