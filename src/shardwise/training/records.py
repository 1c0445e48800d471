"""The files in which a rank says how far it is and why it failed; whoever watches it reads them.

Progress is one small record that is overwritten in place, for one system call a step; a failure is a JSON file that
appears whole. Times are of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["start", "data", "step", "evaluation", "checkpoint", "done", "failed"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order in which a rank passes them within a step
BEAT_SECONDS = 0.5

# A counter stands at both ends: a reader that meets a half-written record sees two numbers.
_PROGRESS = struct.Struct("=QqqddQ")
_BEAT = struct.Struct("=d")
_BEAT_OFFSET = 64
_FAILURE_BYTES = 16_384
_MOST_WORDS = 6_000  # of a message, and of a traceback's end


@dataclass(frozen=True)
class Progress:
    """Where a rank is: a phase of a step since a time; ``limit_seconds`` is what it asked for, 0 the usual."""

    phase: Phase
    step: int
    since: float
    limit_seconds: float
    beat: float  # when it last gave a sign of life


@dataclass(frozen=True)
class FailureRecord:
    """Why a rank failed, in its own words; ``mistake`` says that the user can mend it and a restart cannot."""

    rank: int
    at: float
    phase: Phase
    step: int
    kind: str  # the name of the exception's class
    message: str
    traceback: str
    mistake: bool


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.progress"


def failure_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.failed.json"


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank writes what its threads are doing, when it is asked to by `STACKS_SIGNAL`."""
    return folder / f"rank-{rank}.stacks"


def write_progress(file: int, count: int, phase: Phase, step: int, since: float, limit_seconds: float) -> None:
    os.pwrite(file, _PROGRESS.pack(count, PHASES.index(phase), step, since, limit_seconds, count), 0)


def write_beat(file: int, at: float) -> None:
    os.pwrite(file, _BEAT.pack(at), _BEAT_OFFSET)


def read_progress(file: int) -> Progress | None:
    """The record in an open file; None if there is none yet, or only half of one."""
    data = os.pread(file, _BEAT_OFFSET + _BEAT.size, 0)
    if len(data) < _BEAT_OFFSET + _BEAT.size:
        return None
    count, phase, step, since, limit_seconds, same = _PROGRESS.unpack_from(data)
    (beat,) = _BEAT.unpack_from(data, _BEAT_OFFSET)
    if count != same or not 0 <= phase < len(PHASES):
        return None
    return Progress(PHASES[phase], step, since, limit_seconds, beat)


def reserve_failure(folder: Path, rank: int) -> None:
    """Takes the room that a failure's record needs: a full disk is what it may have to tell of."""
    failure_path(folder, rank).with_suffix(".part").write_bytes(b" " * _FAILURE_BYTES)


def write_failure(folder: Path, record: FailureRecord) -> None:
    """Over the blanks that were reserved; those that stay behind it are no harm to JSON."""
    path = failure_path(folder, record.rank)
    part = path.with_suffix(".part")
    short = replace(record, message=record.message[:_MOST_WORDS], traceback=record.traceback[-_MOST_WORDS:])
    with part.open("r+b" if part.exists() else "wb") as file:
        file.write(json.dumps(asdict(short), indent=1).encode())
    part.rename(path)


def read_failure(folder: Path, rank: int) -> FailureRecord | None:
    try:
        return FailureRecord(**json.loads(failure_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none, or not what a rank writes: how it ended then says what is known
        return None
