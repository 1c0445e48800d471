"""What does not run is refused before anything starts, by the same table that the planner prunes by."""

from __future__ import annotations

from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.support import verdict


def require_runs(job: Job) -> None:
    """Raises SpecError for the worst finding of the support matrix about this job."""
    found = verdict(job)
    if found.status != "runs":
        worst = found.findings[0]
        field = worst.option[0] if worst.option else "strategy"
        raise SpecError(field, f"{' with '.join(worst.techniques)}: {worst.reason}", worst.remedy)
