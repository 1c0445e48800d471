"""What does not run is refused before anything starts, by the same table that the planner prunes by."""

from __future__ import annotations

import torch

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


def require_devices(device: str, ranks: int) -> None:
    """Raises SpecError where this machine has too few devices; on a CPU a rank is a process."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise SpecError("--on", f"cuda: {torch.cuda.device_count()} GPUs for {ranks} ranks", "use --on cpu")
