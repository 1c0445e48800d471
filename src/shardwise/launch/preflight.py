"""Before a process starts: does the job fit its devices and this machine, and what will a step take."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from shardwise.engine.refuse import require_devices, require_runs
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.describe import strategy_words
from shardwise.planner.offload_share import KINDS, smallest_offload
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.packages import TRAINING, require_packages
from shardwise.spec.processor import slow_precision_notes
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes
from shardwise.train.checkpoint.find import start_at
from shardwise.train.data.of_run import check_data

TIGHT = 0.9  # of a device's memory
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
        if job.run.logging.wandb is not None:
            require_packages("run.logging.wandb", "wandb")
        if job.run.start_from is not None:
            start_at(Path(job.run.start_from))
    notes = check_data(job) if here else []
    price = candidate(job)
    needed, there = price.memory.total, job.cluster.device.memory
    if needed > there:
        problem = f"a device needs {readable_bytes(needed)}, {job.cluster.device.name} has {readable_bytes(there)}"
        raise SpecError("strategy", problem, _nearest(job))
    if here:
        _require_host_memory(job, needed)
    if here and job.run_device == "cpu":
        notes += slow_precision_notes(job.training.precision)
    if needed > TIGHT * there:
        notes.append(f"tight: a device needs {readable_bytes(needed)} of {readable_bytes(there)}")
    return Preflight(price, tuple(notes))


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
    if world > PROCESSES_PER_CORE * cores:
        remedy = f"plan for laptop:{cores}, or --print-torchrun for several hosts"
        raise SpecError("cluster", f"{world:,} processes on {cores} cores", remedy)


def _require_host_memory(job: Job, needed_bytes: float) -> None:
    """Processes of a CPU share its memory."""
    if job.run_device == "cuda":
        return
    world, there = job.strategy.world, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if world * needed_bytes > there:
        needed = readable_bytes(world * needed_bytes)
        problem = f"{world} processes need {needed}, this machine has {readable_bytes(there)}"
        raise SpecError("cluster", problem, "a smaller model, batch or sequence")


def _nearest(job: Job) -> str:
    """The strategy that fits and differs in the fewest fields; of several the quickest."""
    found = plan(Request(job, offload=False))
    if not isinstance(found, Plan):
        return _with_offload(job)
    best = min(found.candidates, key=lambda one: (_changes(job.strategy, one.job.strategy), one.step_seconds))
    return f"nearest that fits: {strategy_words(best.job.strategy)} ({readable_bytes(best.memory.total)})"


def _with_offload(job: Job) -> str:
    """For where no layout fits by itself. A CPU's own memory is what is full, so that its states go to disk."""
    target: Literal["cpu", "nvme"] = "nvme" if job.run_device == "cpu" else "cpu"
    try:
        wanted = job.with_strategy(offload=replace(job.strategy.offload, target=target))
        offload = smallest_offload(wanted).strategy.offload
        require_runs(job.with_strategy(offload=offload))
    except SpecError:
        return "nothing fits these devices: use more of them (`shardwise plan`)"
    shares = ", ".join(f"{kind}: {getattr(offload, kind):g}" for kind in KINDS if getattr(offload, kind))
    return f"the least that fits: strategy.offload: {{{shares}, target: {offload.target}}}"


def _changes(one: Strategy, other: Strategy) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Strategy))
