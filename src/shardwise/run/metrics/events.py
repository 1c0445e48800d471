"""What happened to a run as lines of JSON: its starts, its failures, its end.

The launcher writes them, or rank 0 if another program started the ranks. A run without an end was killed, or is still
running.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from socket import gethostname
from typing import Any

from shardwise.spec.files import bounded_lines, parse_json

_MOST_LINE_BYTES = 2**22
STARTED, FAILED, ENDED = "started", "failed", "ended"


@dataclass(frozen=True)
class RunEvent:
    """A start, a failure or the end of a run."""

    at: float
    """Seconds since the epoch."""
    kind: str
    attempt: int
    """Counted from 0 within one command."""
    text: str = ""
    folder: str | None = None
    """Where the ranks of the attempt report."""
    host: str = ""
    """That wrote it."""
    status: int | None = None
    """Exit status, of an end."""
    stopped: bool = False
    """By request."""


class EventLog:
    """Appends to events.jsonl, even after its folder is moved; a full disk loses an event, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def write(self, kind: str, attempt: int, text: str = "", **more: Any) -> None:
        line = json.dumps(
            {"at": time.time(), "kind": kind, "attempt": attempt, "text": text, "host": gethostname(), **more}
        )
        with suppress(OSError):
            self._file = self._file or self._path.open("ab", buffering=0)
            self._file.write(f"{line}\n".encode())

    def ended(self, attempt: int, status: int, *, stopped: bool = False, why: str = "") -> None:
        self.write(ENDED, attempt, why, status=status, stopped=stopped)


@contextmanager
def ends_recorded(log: EventLog, attempt: int) -> Iterator[None]:
    """Records the run's end if the block raises."""
    try:
        yield
    except BaseException as error:
        log.ended(attempt, getattr(error, "status", 1), why=str(error))
        raise


def read_events(path: Path) -> list[RunEvent]:
    """The complete events, oldest first."""
    events = []
    with suppress(OSError), path.open("rb") as file:
        for line in bounded_lines(file, _MOST_LINE_BYTES):
            with suppress(ValueError, TypeError):
                event = RunEvent(**parse_json(line or b""))
                if isinstance(event.at, (int, float)) and isinstance(event.attempt, int):
                    events.append(event)
    return events
