"""One rank of a run: `python -m shardwise.training.worker RUN_FOLDER`, started by our launcher or another.

With `--dry-step` behind the folder, it is one trial step of the job.

Exits with 0 when the run is done, with 2 for a user's error, and with `STOPPED` after a signal and a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import bind_gloo, process_group, store_at
from shardwise.engine.refuse import require_backend
from shardwise.engine.torch_private import Store
from shardwise.layout.groups import node_of
from shardwise.run.attempt import DRY_STEP, STOPPED, Reporter, WorldPlace
from shardwise.run.checkpoint.folder import HeldFolders, RunFolder
from shardwise.run.data.run_data import mixtures_of
from shardwise.run.metrics.recorder import STARTED, EventLog, Recorder
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.run import Profile
from shardwise.spec.units import counted
from shardwise.training.agreement import StopSignal
from shardwise.training.checkpoint.save import memory_folder
from shardwise.training.checkpointing import State, begin, load_newest
from shardwise.training.loop import Loop, LoopParts, MemoryFolder
from shardwise.training.memory import peak_during
from shardwise.training.profiler import PROFILED, USUAL, NvtxSteps, Profiler, flights_watched, record_collectives

_logger = logging.getLogger("shardwise.training")

Work = Callable[[RunFolder, WorldPlace, Reporter, StopSignal], int]  # returns the exit status


def main(arguments: list[str], work: Work) -> int:
    """Does ``work`` as the rank given by the environment; returns the exit status."""
    logging.basicConfig(format="%(message)s")  # to stderr, this rank's log
    stop = StopSignal()
    stop.listen()
    try:
        place = WorldPlace.from_environment()
    except SpecError as error:
        _logger.error("shardwise: error: %s", error)
        return 2
    folder = RunFolder(Path(arguments[0]))
    if place.folder is not None or place.rank:  # the launcher records what happens
        return take_part(folder, work, place, stop)
    return recorded_part(folder, work, place, stop)


def recorded_part(folder: RunFolder, work: Work, place: WorldPlace, stop: StopSignal) -> int:
    """As `take_part`, for rank 0 of a world that another program started: also records the run's start and end."""
    log = EventLog(folder.events)
    attempt = _number(place)
    log.write(
        STARTED, attempt, counted(place.world, "process"), folder=str((folder.attempts / place.attempt).resolve())
    )
    status = take_part(folder, work, place, stop)
    if status != STOPPED:  # recorded already, while the others waited
        log.ended(attempt, status)
    return status


def _number(place: WorldPlace) -> int:
    """How many times the launcher has restarted the ranks."""
    kind, _, number = place.attempt.partition("-")
    return int(number) if kind == "restart" else 0


def take_part(folder: RunFolder, work: Work, place: WorldPlace, stop: StopSignal) -> int:
    """Does ``work`` as the rank of ``place``; returns the exit status."""
    reporter = Reporter(place)
    try:
        with _exclusive(folder, place):
            return work(folder, place, reporter, stop)
    except BaseException as error:
        why = error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a restart would not help
            why = SpecError(str(error.filename or folder.path), "has no space left", "make room and start it again")
        reporter.failed(why)
        if isinstance(why, SpecError):
            _logger.error("shardwise: error: %s", why)
            return 2
        _logger.error("the rank failed", exc_info=why)
        return 1


@contextlib.contextmanager
def _exclusive(folder: RunFolder, place: WorldPlace) -> Iterator[None]:
    """Ensures that the folder has a single run: the launcher has locked it, or without one rank 0 does.

    Removes unfinished checkpoints of earlier attempts; nobody is saving yet, since that takes all ranks.
    """
    if place.rank:
        yield
        return
    with folder.checkpoints.locked() if place.folder is None else contextlib.nullcontext():
        folder.checkpoints.clear_unfinished()
        yield


def train(folder: RunFolder, place: WorldPlace, reporter: Reporter, stop: StopSignal) -> int:
    """Takes part in the run of ``folder`` until it is done: 0; or until a signal stops it: `STOPPED`."""
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    training, validation = mixtures_of(job, folder.path)
    records = place.folder or folder.attempts / place.attempt
    with engine_of(job, place) as engine, flights_watched(records, place.rank, reporter.requests):
        damaged: list[str] = []
        memory = _memory_of(job, folder, place)
        kept = None if memory is None else memory.folder
        if job.training.freezes:  # checkpoints hold nothing of what is frozen
            begin(engine)
        state = load_newest(engine, folder.checkpoints, damaged.append, memory=kept)
        if state is None:
            state = State()
            if not job.training.freezes:
                begin(engine)
        for problem in damaged:
            _logger.warning("skipped a damaged checkpoint: %s", problem)
        recorder = Recorder(job, folder.path, state.position.step) if place.rank == 0 else None
        if recorder:
            for problem in damaged:
                recorder.write({"step": state.position.step, "checkpoint_damaged": problem})
            if memory is not None and state.position.step:
                origin = "checkpoint" if state.saved else "memory"
                recorder.write({"step": state.position.step, "restored_from": origin})
        profiler = _profiler_of(job, engine, folder)
        parts = LoopParts(
            job, engine, training, validation, folder.checkpoints, reporter, recorder, profiler, stop, memory,
            HeldFolders.of_run(folder),
        )  # fmt: skip
        end = Loop(parts, state).run()
        if recorder:
            recorder.close()
        if end.step >= job.run.last_step:
            return 0
        if place.folder is None:  # such launchers kill all ranks once one exits with a status other than 0
            if place.rank == 0:
                EventLog(folder.events).ended(_number(place), STOPPED, stopped=True)
            dist.barrier()
        return STOPPED


def step_once(folder: RunFolder, place: WorldPlace, reporter: Reporter, stop: StopSignal) -> int:
    """A trial step on random tokens, which writes the highest peak of all ranks, in bytes.

    It runs in processes of its own: a GPU that ran out of memory is clean for the next try. A traced step would not
    show what the allocator needs.
    """
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    with engine_of(job, place) as engine:
        reporter.phase("step", 0, job.run.timeouts.start)
        rows = len(engine.rows)
        text = torch.randint(job.model.vocab, (rows, job.training.seq + 1), device=engine.device)
        batch = Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        _, peak = peak_during(engine.device, lambda: engine.step(batch))
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
    if place.rank == 0:
        folder.peak.write_text(json.dumps({"peak_bytes": max(peaks)}), encoding="utf-8")
    reporter.phase("done", 1)
    return 0


def _profiler_of(job: Job, engine: Engine, folder: RunFolder) -> Profiler | NvtxSteps | None:
    """What records the steps of `run.profile` or, now and then, for `run.recut`; or marks those of `run.nvtx`."""
    if job.run.nvtx is not None:
        return NvtxSteps(engine, job.run.nvtx)
    recut = job.run.recut
    if recut is not None:
        window = Profile(first=recut.every - recut.steps + 1, last=recut.every)
        return Profiler(engine, window, folder.profile, every=recut.every)
    return None if job.run.profile is None else Profiler(engine, job.run.profile, folder.profile)


def _memory_of(job: Job, folder: RunFolder, place: WorldPlace) -> MemoryFolder | None:
    """Where this rank's copies in memory go, if the job asks for them."""
    if job.run.checkpoints.memory is None:
        return None
    node = node_of(place.rank, place.ranks_here)
    return MemoryFolder(memory_folder(folder.keepers, node), folder.note_copy)


@contextlib.contextmanager
def engine_of(job: Job, place: WorldPlace) -> Iterator[Engine]:
    """This rank's part of the job, in the process group of all ranks."""
    device = job.run_device
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("run.device", "PyTorch finds no GPU here", "run.device: cpu, or another cluster")
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Ranks that use all cores each would slow each other down.
        cores = len(os.sched_getaffinity(0))
        bound = cores < (os.cpu_count() or 1)  # its launcher has bound it to cores of its own
        torch.set_num_threads(max(1, cores if bound and place.folder is None else cores // place.ranks_here))
    record_collectives(USUAL if job.run.profile is None else PROFILED)
    timeouts = job.run.timeouts
    # Our launcher enforces a limit per phase; this one is for ranks started by others.
    longest = max(timeouts.start, timeouts.step, timeouts.checkpoint)
    require_backend(job, by_mpi=place.by_mpi)
    on_cpu = "gloo" if job.run.backend == "auto" else f"cpu:{job.run.backend}"
    meeting = _meeting(place, timeouts.start)
    with process_group(place.rank, place.world, meeting, device=device, seconds=longest, on_cpu=on_cpu):
        yield Engine(job, device=device, seed=job.run.seed)


def _meeting(place: WorldPlace, seconds: float) -> str | Store:
    """Where the ranks of this attempt find each other."""
    if place.rendezvous is not None:
        return str(place.rendezvous)
    assert place.address is not None and place.port is not None
    bind_gloo(place.address, several_hosts=place.ranks_here < place.world)
    return store_at(place.address, place.port, place.rank, place.world, seconds)


def leave(status: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if status:
        os._exit(status)  # threads of broken communication would keep the process alive
    sys.exit(0)


if __name__ == "__main__":
    leave(main(sys.argv[1:], step_once if DRY_STEP in sys.argv else train))
