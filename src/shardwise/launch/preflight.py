"""Before a process starts: does the job fit its devices and this machine, and what will a step take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of, room_of, tight_words
from shardwise.engine.offload.folder import require_folder
from shardwise.engine.refuse import require_devices, require_runs
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.remedy import what_would_fit
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.packages import TRAINING, require_packages
from shardwise.spec.processor import slow_precision_notes
from shardwise.spec.rules import sequence_note
from shardwise.spec.units import readable_bytes
from shardwise.train.checkpoint.find import require_start
from shardwise.train.data.of_run import check_data

PROCESSES_PER_CORE = 4  # of CPU jobs: more would only wait for each other


@dataclass(frozen=True)
class Preflight:
    """``price`` is what the job is predicted to take; ``notes`` what its user should know."""

    price: Candidate
    notes: tuple[str, ...]


def preflight(job: Job, *, here: bool = True) -> Preflight:
    """Raises SpecError, in one line, for a job that cannot run; ``here``: on this machine alone."""
    require_runs(job)
    try:
        job.run.data.check_vocabulary(job.model.vocab)
    except SpecError as error:
        raise error.under("run.data") from None
    if here:
        _require_places(job)
        require_packages("train", *TRAINING)
        require_folder(job)
        if job.run.logging.wandb is not None:
            require_packages("run.logging.wandb", "wandb")
        if job.run.start_from is not None:
            _require_weights(job, Path(job.run.start_from))
    notes = check_data(job) if here else []
    price = candidate(job)
    require_fits(job)
    if here:
        _require_host_memory(job, price.memory.total)
    if here and job.run_device == "cpu":
        notes += slow_precision_notes(job.training.precision)
    notes += filter(None, [sequence_note(job.model, job.training)])
    if fit_of(job) == "tight":
        notes.append(tight_words(job))
    return Preflight(price, tuple(notes))


def require_fits(job: Job) -> None:
    """Raises DoesNotFit for a job whose devices have no room for what is predicted."""
    if fit_of(job) != "does not fit":
        return
    needed, there = readable_bytes(peak_memory(job).total), readable_bytes(room_of(job).usable_bytes)
    problem = f"a device needs {needed}, {job.cluster.device.name} has {there}"
    raise DoesNotFit("strategy", problem, what_would_fit(job))


def _require_weights(job: Job, source: Path) -> None:
    from shardwise.train.checkpoint.expected import require_weights  # with torch, which who only asks does without

    require_start(job.model, source)
    require_weights(job.model, source)


def _require_places(job: Job) -> None:
    """A GPU for every rank; on a CPU a rank is a process."""
    world = job.strategy.world
    if job.run_device == "cuda":
        try:
            require_devices("cuda", world)
        except SpecError as error:
            remedy = "plan for the devices that are here, or --print-torchrun for several hosts"
            raise SpecError("cluster", error.problem, remedy) from None
        return
    cores = len(os.sched_getaffinity(0))
    require_cores("cluster", world, f"plan for laptop:{cores}, or --print-torchrun for several hosts")


def require_cores(field: str, processes: int, remedy: str) -> None:
    """Raises SpecError for more processes than the cores of this machine can share."""
    cores = len(os.sched_getaffinity(0))
    if processes > PROCESSES_PER_CORE * cores:
        raise SpecError(field, f"{processes:,} processes on {cores} cores", remedy)


def _require_host_memory(job: Job, needed_bytes: float) -> None:
    """Processes of a CPU share its memory."""
    if job.run_device == "cuda":
        return
    world, there = job.strategy.world, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if world * needed_bytes > there:
        needed = readable_bytes(world * needed_bytes)
        problem = f"{world} processes need {needed}, this machine has {readable_bytes(there)}"
        raise DoesNotFit("cluster", problem, "a smaller model, batch or sequence")
