"""What does not run is refused before anything starts, by the same table that the planner prunes by.

The few things that are priced for this engine and not built yet are refused too: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.cost.own_schedules import require_gradient_schedules
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict

_LACKING: tuple[tuple[str, Callable[[Strategy], bool], str, str], ...] = (
    ("strategy.overlap.tp", lambda one: one.overlap.tp and one.tp > 1,
     "this engine does not hide tensor parallelism under its products", "overlap.tp: false"),
    ("strategy.overlap.ep", lambda one: one.overlap.ep and one.ep > 1,
     "this engine does not hide the exchange of tokens under another microbatch", "overlap.ep: false"),
)  # fmt: skip


def require_runs(job: Job) -> None:
    """Raises SpecError for the worst finding of the support matrix about this job, or for what is not built."""
    found = verdict(job)
    if found.status != "runs":
        worst = found.findings[0]
        field = worst.option[0] if worst.option else "strategy"
        raise SpecError(field, f"{' with '.join(worst.techniques)}: {worst.reason}", worst.remedy)
    for field, used, problem, remedy in _LACKING:
        if used(job.strategy):
            raise SpecError(field, problem, remedy)
    require_gradient_schedules(job)


def require_devices(device: str, ranks: int) -> None:
    """Raises SpecError where this machine has too few devices; on a CPU a rank is a process."""
    import torch  # who only asks what runs does without

    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise SpecError("--on", f"cuda: {torch.cuda.device_count()} GPUs for {ranks} ranks", "use --on cpu")
