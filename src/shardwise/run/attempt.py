"""A worker's place in its world, and the files in which it reports its progress and why it failed.

Progress is a small record that is overwritten in place, by one system call per step. A failure is a JSON file that
appears complete. Times are those of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from shardwise.run.environment import OWN_LAUNCHER, Started, started
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_json

Phase = Literal["start", "data", "step", "evaluation", "checkpoint", "done", "failed"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order in which a rank passes them within a step
BEAT_SECONDS = 0.5
STOPPED = 76  # exit status of a rank that a signal stopped early, with a checkpoint; no crash has it
WORKER = "shardwise.training.worker"  # the module that every rank runs
DRY_STEP = "--dry-step"  # tells a worker to make one trial step

# A counter at both ends: in a half-written record the two differ.
_PROGRESS = struct.Struct("=QqqddQ")
_BEAT = struct.Struct("=d")
_BEAT_OFFSET = 64
_FAILURE_BYTES = 16_384
_MOST_CHARACTERS = 6_000  # of a message, and of a traceback's end
STACKS_SIGNAL = signal.SIGUSR2  # asks a rank for the stacks of its threads, and for its last collectives
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RankProgress:
    """Which phase of which step a rank is in."""

    phase: Phase
    step: int
    since: float  # when the phase began
    limit_seconds: float  # how long the rank asked to be given for this phase; 0 is the default
    beat: float  # its last heartbeat


@dataclass(frozen=True)
class FailureRecord:
    """Why a rank failed, in its own words."""

    rank: int
    at: float
    phase: Phase
    step: int
    kind: str  # name of the exception's class
    message: str
    traceback: str
    mistake: bool  # the user can fix it; a restart cannot


def rank_file(
    folder: Path, rank: int, kind: Literal["log", "progress", "failed.json", "stacks", "flight.json"]
) -> Path:
    """A file of a rank; `STACKS_SIGNAL` makes the rank write ``stacks`` and ``flight.json``."""
    return folder / f"rank-{rank}.{kind}"


def write_progress(file: int, count: int, phase: Phase, step: int, since: float, limit_seconds: float) -> None:
    os.pwrite(file, _PROGRESS.pack(count, PHASES.index(phase), step, since, limit_seconds, count), 0)


def write_beat(file: int, at: float) -> None:
    os.pwrite(file, _BEAT.pack(at), _BEAT_OFFSET)


def read_progress(file: int) -> RankProgress | None:
    """The record in an open file; None if there is none yet, or it is half-written."""
    data = os.pread(file, _BEAT_OFFSET + _BEAT.size, 0)
    if len(data) < _BEAT_OFFSET + _BEAT.size:
        return None
    count, phase, step, since, limit_seconds, same = _PROGRESS.unpack_from(data)
    (beat,) = _BEAT.unpack_from(data, _BEAT_OFFSET)
    if count != same or not 0 <= phase < len(PHASES):
        return None
    return RankProgress(PHASES[phase], step, since, limit_seconds, beat)


def reserve_failure(folder: Path, rank: int) -> None:
    """Reserves space for a failure record, since the failure may be a full disk."""
    rank_file(folder, rank, "failed.json").with_suffix(".part").write_bytes(b" " * _FAILURE_BYTES)


def write_failure(folder: Path, record: FailureRecord) -> None:
    """Overwrites the reserved blanks; trailing blanks are valid JSON."""
    path = rank_file(folder, record.rank, "failed.json")
    part = path.with_suffix(".part")
    short = replace(record, message=record.message[:_MOST_CHARACTERS], traceback=record.traceback[-_MOST_CHARACTERS:])
    with part.open("r+b" if part.exists() else "wb") as file:
        file.write(json.dumps(asdict(short), indent=1).encode())
    part.rename(path)


def read_failure(folder: Path, rank: int) -> FailureRecord | None:
    try:
        return FailureRecord(**read_json(rank_file(folder, rank, "failed.json"), "record of a failure"))
    except (OSError, ValueError, TypeError):  # missing or invalid: only the exit status is known
        return None


@dataclass(frozen=True)
class WorldPlace:
    """One process of an attempt to train, and where it meets the others."""

    rank: int
    world: int
    local_rank: int
    rendezvous: Path | None = None  # file through which the ranks of one machine meet, new for each attempt
    address: str | None = None  # with ``port``, where ranks of several machines meet
    port: int | None = None
    folder: Path | None = None  # where this attempt's records go; None if another program started the workers
    launcher: int | None = None  # process that reads the records; None if another program started the workers
    attempt: str = "1"  # identifies this attempt of the run; equal on all ranks
    ranks_here: int = 1
    by_mpi: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorldPlace:
        process = started(environment, always=True)
        if process is None:
            raise SpecError("RANK", "is not set", "start workers by `shardwise train`, torchrun, srun or mpirun")
        return cls.of(process, environment)

    @classmethod
    def of(cls, process: Started, environment: Mapping[str, str] = os.environ) -> WorldPlace:
        folder, launcher = environment.get("SHARDWISE_ATTEMPT_FOLDER"), environment.get(OWN_LAUNCHER)
        rendezvous = environment.get("SHARDWISE_RENDEZVOUS")
        counters = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
        restarts = (environment[name] for name in counters if name in environment)
        return cls(
            rank=process.rank,
            world=process.world,
            local_rank=process.local_rank,
            rendezvous=Path(rendezvous) if rendezvous else None,
            address=process.address,
            port=process.port,
            folder=Path(folder) if folder else None,
            launcher=int(launcher) if launcher else None,
            attempt=Path(folder).name if folder else f"restart-{next(restarts, '0')}",
            ranks_here=process.ranks_per_host,
            by_mpi=process.is_mpi,
        )


class Reporter:
    """A rank's reports to the launcher: its progress, its heartbeat, and why it failed.

    Without a launcher every call is a no-op. With one, the process ends when the launcher does, and a thread can read
    the signals that arrived from the file ``requests``.
    """

    def __init__(self, place: WorldPlace) -> None:
        self._place = place
        self._phase: Phase = "start"
        self._step = 0
        self._count = 0
        self._file: int | None = None
        self._closed = threading.Event()
        self.requests: int | None = None
        if place.folder is None:
            return
        if place.launcher is not None:
            die_with(place.launcher)
        stacks = rank_file(place.folder, place.rank, "stacks").open("w", encoding="utf-8")
        self.requests = _signals_as_bytes()
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=self.requests is not None)
        path = rank_file(place.folder, place.rank, "progress")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        reserve_failure(place.folder, place.rank)
        self.phase("start", 0)
        write_beat(self._file, time.monotonic())
        threading.Thread(target=self._beat, args=(self._file,), name="beat", daemon=True).start()

    def phase(self, name: Phase, step: int, limit_seconds: float | None = None) -> None:
        """This rank begins a phase, which may take as long as its limit, or ``limit_seconds`` if that is longer."""
        self._phase, self._step = name, step
        if self._file is None:
            return
        self._count += 1
        write_progress(self._file, self._count, name, step, time.monotonic(), limit_seconds or 0.0)

    def failed(self, error: BaseException) -> None:
        """Records why this rank failed; the process may then take its time to end."""
        if self._place.folder is None:
            return
        record = FailureRecord(
            rank=self._place.rank,
            at=time.monotonic(),
            phase=self._phase,
            step=self._step,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            mistake=isinstance(error, SpecError),
        )
        with contextlib.suppress(OSError):  # a full disk: the traceback is in the log, if anywhere
            write_failure(self._place.folder, record)
        self.phase("failed", self._step)

    def close(self) -> None:
        self._closed.set()

    def _beat(self, file: int) -> None:
        """The heartbeat; it stops when the process is stopped or a thread never releases the GIL."""
        while not self._closed.wait(BEAT_SECONDS):
            write_beat(file, time.monotonic())


def _signals_as_bytes() -> int | None:
    """A pipe that gets a byte for every signal, even while the main thread is blocked; None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(writes, False)
    signal.signal(STACKS_SIGNAL, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    return reads


def die_with(launcher: int) -> None:
    """Has the Linux kernel kill this process when the launcher dies; on other systems the launcher's guard does."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
