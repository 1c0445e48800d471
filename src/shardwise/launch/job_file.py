"""The job as its processes read it, with what it is predicted to cost; written anew with another layout."""

from __future__ import annotations

from shardwise.planner.candidate import Candidate, candidate
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.recorder import write_prediction
from shardwise.spec.job import Job


def write_job(job: Job, folder: RunFolder, price: Candidate | None = None) -> None:
    """There is always a whole one; ``price``, if it is known."""
    temporary = folder.job.with_suffix(".part")
    temporary.write_text(job.to_yaml(), encoding="utf-8")
    temporary.replace(folder.job)
    memory = (price := price or candidate(job)).memory
    # Runs measure the tensors of a rank, not the framework's own memory.
    write_prediction(folder.path, price.step_seconds, memory.total - memory.allowance)
