"""Checks before a run starts: whether the job fits its devices and this machine, and whether one step runs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.cost.analysis import analyze
from shardwise.cost.campaign import checkpoint_bytes
from shardwise.cost.memory.device import device_memories
from shardwise.cost.memory.room import fit_of, room_of, tight_words, tightest
from shardwise.engine.refuse import require_backend, require_devices, require_folder, require_nvtx, require_runs
from shardwise.launch.local import supervise
from shardwise.planner.advice.assessment import what_would_fit
from shardwise.planner.automatic import ways_to_fit
from shardwise.planner.candidate import Candidate, candidate
from shardwise.run.attempt import DRY_STEP, WORKER
from shardwise.run.checkpoint.folder import RunFolder, require_start
from shardwise.run.data.run_data import check_data
from shardwise.run.environment import Started
from shardwise.run.storage.place import place_of, require_stores
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.installation import TRAINING, require_packages, slow_precision_notes
from shardwise.spec.job import Job
from shardwise.spec.rules import sequence_note
from shardwise.spec.units import readable_bytes

PROCESSES_PER_CORE = 4  # of CPU jobs: more would only wait for each other
COPIES = 5  # in memory: one being sent, and the last and the next one on two nodes each
_OUT_OF_MEMORY = ("OutOfMemory", "out of memory", "allocate memory", "MemoryError")


@dataclass(frozen=True)
class Preflight:
    price: Candidate  # the predicted cost of the job
    notes: tuple[str, ...]  # for the user


def preflight(job: Job, *, here: bool = True, started: Started | None = None, elsewhere: bool = False) -> Preflight:
    """Raises SpecError for a job that cannot run.

    ``here``: all ranks run on this machine, or those that a launcher has ``started`` here. ``elsewhere``: no rank runs
    here, but the ranks see the same storage.
    """
    require_runs(job)
    if job.run.checkpoints.memory is not None and (not here or started is not None):
        problem = "needs a process on every node that keeps the copies; `train` starts them here, on hosts and on ray"
        raise SpecError("run.checkpoints.memory", problem, "leave it out")
    for name, asked in (("run.restarts.shrink", job.run.restarts.shrink), ("run.recut", job.run.recut is not None)):
        if asked and (not here or started is not None):
            problem = "needs a launcher that starts ranks anew; only `shardwise train` by itself is one"
            raise SpecError(name, problem, "leave it out")
    if job.run.recut is not None:
        _require_recut(job)
    if job.run.nvtx is not None:
        require_nvtx(job)
    try:
        job.run.data.check_vocabulary(job.model.vocab)
    except SpecError as error:
        raise error.under("run.data") from None
    ranks_here = 0 if elsewhere else job.strategy.world if started is None else started.ranks_per_host
    if here:
        _require_devices(job, ranks_here, cores=None if started is None else os.cpu_count())
        require_backend(job, by_mpi=started is not None and started.is_mpi)
        require_packages("train", *TRAINING)
        require_folder(job)
        require_stores(job.run)
        if job.run.logging.wandb is not None:
            require_packages("run.logging.wandb", "wandb")
        if job.run.start_from is not None:
            from shardwise.training.checkpoint.load import require_weights  # imports torch

            start = place_of(job.run.start_from, job.run.timeouts.checkpoint)
            require_start(job.model, start)
            require_weights(job.model, start)
    notes = check_data(job) if here else []
    price = candidate(job)
    require_fits(job)
    if here:
        _require_host_memory(job, ranks_here, price.memory.total)
        if not elsewhere:
            _require_room_for_copies(job)
    if here and job.run_device == "cpu":
        notes += slow_precision_notes(job)
    notes += filter(None, [sequence_note(job.model, job.training)])
    if fit_of(job) == "tight":
        notes.append(tight_words(job))
    return Preflight(price, tuple(notes))


def _require_recut(job: Job) -> None:
    if job.strategy.pp == 1:
        problem = "the run has one pipeline stage: no layer can move to another rank"
        raise SpecError("run.recut", problem, "leave it out, or strategy.pp: 2")
    if job.strategy.has_unlike_stages:
        problem = "stages of unlike degrees (stage_tp, stage_dp) are not cut anew"
        raise SpecError("run.recut", problem, "leave it out")


def require_fits(job: Job) -> None:
    """Raises DoesNotFit for a job whose predicted memory exceeds its devices."""
    if fit_of(job) != "does not fit":
        return
    fullest, memory = tightest(job, device_memories(job))
    needed, there = readable_bytes(memory.total), readable_bytes(room_of(fullest).usable_bytes)
    problem = f"a device needs {needed}, {fullest.cluster.device.name} has {there}"
    raise DoesNotFit("strategy", problem, what_would_fit(job))


def _require_devices(job: Job, ranks: int, cores: int | None) -> None:
    """Requires a GPU per rank, or enough cores; mpirun binds a process to one core, so ``cores`` counts all of them."""
    if job.run_device == "cuda":
        try:
            require_devices("cuda", ranks)
        except SpecError as error:
            remedy = "plan for the devices that are here, or ⟨on=hosts.txt⟩ for several hosts"
            raise SpecError("cluster", error.problem, remedy) from None
        return
    cores = cores or len(os.sched_getaffinity(0))
    require_cores("cluster", ranks, f"plan for laptop:{cores}, or ⟨on=hosts.txt⟩ for several hosts", cores)


def require_cores(field: str, processes: int, remedy: str, cores: int | None = None) -> None:
    """Raises SpecError for more processes than the cores of this machine can share."""
    cores = cores or len(os.sched_getaffinity(0))
    if processes > PROCESSES_PER_CORE * cores:
        raise SpecError(field, f"{processes:,} processes on {cores} cores", remedy)


def _require_host_memory(job: Job, ranks: int, needed_bytes: float) -> None:
    """Requires memory for all processes of a CPU job, which share that of the machine."""
    if job.run_device == "cuda":
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks * needed_bytes > there:
        needed = readable_bytes(ranks * needed_bytes)
        problem = f"{ranks} processes need {needed}, this machine has {readable_bytes(there)}"
        raise DoesNotFit("cluster", problem, "a smaller model, batch or sequence")


def _require_room_for_copies(job: Job) -> None:
    """Requires memory for the copies of the state that a run keeps on this machine."""
    if job.run.checkpoints.memory is None:
        return
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = COPIES * checkpoint_bytes(analyze(job))
    if needed > there:
        problem = f"{COPIES} copies of the state are {readable_bytes(needed)}, this machine has {readable_bytes(there)}"
        raise DoesNotFit("run.checkpoints.memory", problem, "leave it out")


def with_fitting_microbatch(job: Job, folder: RunFolder, report: Callable[[str], None]) -> Job:
    """The job with the largest microbatch whose dry step fits; unchanged unless the microbatch is `auto`.

    A resumed run keeps the microbatch that it began with.
    """
    if "microbatch" not in job.run.automatic:
        return job
    before = _found_before(job, folder)
    if before is not None:
        return before
    return _first_that_fits(ways_to_fit(job), RunFolder(folder.path / "dry-step"), report)


def _first_that_fits(ways: Sequence[Job], folder: RunFolder, report: Callable[[str], None]) -> Job:
    for job in ways:
        problem = _why_not_fitting(job, folder)
        if problem is None:
            report(f"microbatch {job.strategy.microbatch}: a dry step fits")
            return job
        report(f"microbatch {job.strategy.microbatch}: {problem}")
    raise SpecError("strategy.microbatch", f"not even {job.strategy.microbatch} fits: {problem}", "`shardwise plan`")


def _why_not_fitting(job: Job, folder: RunFolder) -> str | None:
    """Runs one step of the job: why it does not fit its devices, None if it does."""
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    folder.job.write_text(job.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", WORKER, str(folder.path.resolve()), DRY_STEP]
    outcome = supervise(command, job.strategy.world, folder.attempts, timeouts=job.run.timeouts, restarts=0)
    if outcome.stopped:
        raise SystemExit(outcome.status)
    if outcome.failure is not None:
        # The system kills the process, or the allocator raises.
        if outcome.failure.cause == "killed" or any(words in outcome.failure.reason for words in _OUT_OF_MEMORY):
            return f"out of memory, {outcome.failure}"
        raise SpecError("strategy.microbatch", f"the dry step failed: {outcome.failure}", f"see {outcome.failure.log}")
    peak = json.loads(folder.peak.read_text(encoding="utf-8"))["peak_bytes"]
    device = job.cluster.device
    room = device.usable_memory - device.framework_memory
    return None if peak <= room else f"a step takes {readable_bytes(peak)} of {readable_bytes(room)}"


def _found_before(job: Job, folder: RunFolder) -> Job | None:
    if not folder.job.exists() or not folder.checkpoints.committed():
        return None
    before = Job.from_dict(read_yaml(folder.job, "job file"))
    same = replace(before.strategy, microbatch=job.strategy.microbatch, offload=job.strategy.offload) == job.strategy
    if not same or before.run.automatic != job.run.automatic or before.cluster != job.cluster:
        return None
    return job.with_strategy(microbatch=before.strategy.microbatch, offload=before.strategy.offload)
