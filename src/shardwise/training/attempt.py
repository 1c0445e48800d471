"""What a worker process knows about its place among the others, and how it reports to whoever started it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.errors import SpecError, shown
from shardwise.training.records import (
    BEAT_SECONDS,
    FailureRecord,
    Phase,
    progress_path,
    reserve_failure,
    stacks_path,
    write_beat,
    write_failure,
    write_progress,
)

STACKS_SIGNAL = signal.SIGUSR2  # asks a rank to write down what its threads are doing
_STARTED_BY = "start workers by `shardwise train` or torchrun"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Place:
    """One process of an attempt to train.

    The processes meet in a file (``meeting``, new for each attempt) or, across machines, at ``address`` and ``port``.
    ``folder`` is where this attempt's records go and ``launcher`` the process that reads them; both are absent where
    another program started the workers.
    """

    rank: int
    world: int
    local_rank: int
    meeting: Path | None = None
    address: str | None = None
    port: int | None = None
    folder: Path | None = None
    launcher: int | None = None
    attempt: str = "1"  # tells this attempt from others of the same run; equal on all ranks

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        rank, world = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
        meeting, address = environment.get("SHARDWISE_MEETING"), environment.get("MASTER_ADDR")
        if meeting is None and address is None and world > 1:
            raise SpecError("MASTER_ADDR", "is not set", _STARTED_BY)
        folder, launcher = environment.get("SHARDWISE_ATTEMPT_FOLDER"), environment.get("SHARDWISE_LAUNCHER")
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=rank,
            world=world,
            local_rank=number_in(environment, "LOCAL_RANK"),
            meeting=Path(meeting) if meeting else None,
            address=address,
            port=number_in(environment, "MASTER_PORT") if address and not meeting else None,
            folder=Path(folder) if folder else None,
            launcher=int(launcher) if launcher else None,
            attempt=Path(folder).name if folder else f"restart-{restart}",
        )


def number_in(environment: Mapping[str, str], name: str, remedy: str = _STARTED_BY) -> int:
    """What a variable says that whoever starts ranks has to set."""
    text = environment.get(name)
    if text is None:
        raise SpecError(name, "is not set", remedy)
    if not text.isdecimal():
        raise SpecError(name, f"{shown(text)} is not a number", remedy)
    return int(text)


class Reporter:
    """A rank's reports to the launcher: where it is, that it lives, and why it failed.

    Where no launcher reads them every call does nothing. With one, the process ends when the launcher does.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._phase: Phase = "start"
        self._step = 0
        self._count = 0
        self._file: int | None = None
        self._closed = threading.Event()
        if place.folder is None:
            return
        if place.launcher is not None:
            _end_with(place.launcher)
        stacks = stacks_path(place.folder, place.rank).open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        self._file = os.open(progress_path(place.folder, place.rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        reserve_failure(place.folder, place.rank)
        self.phase("start", 0)
        write_beat(self._file, time.monotonic())
        threading.Thread(target=self._beat, args=(self._file,), name="beat", daemon=True).start()

    def phase(self, name: Phase, step: int, limit_seconds: float | None = None) -> None:
        """This rank now begins ``name`` of ``step``; it may take the phase's limit, or ``limit_seconds`` if more."""
        self._phase, self._step = name, step
        if self._file is None:
            return
        self._count += 1
        write_progress(self._file, self._count, name, step, time.monotonic(), limit_seconds or 0.0)

    def failed(self, error: BaseException) -> None:
        """Says why this rank ends. The process may then take its time: the launcher knows."""
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
        """Runs as long as the process does; one that is stopped, or holds the interpreter's lock, falls silent."""
        while not self._closed.wait(BEAT_SECONDS):
            write_beat(file, time.monotonic())


def _end_with(launcher: int) -> None:
    """This process is killed when the launcher dies in any way; where the system cannot do that, a guard does."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
