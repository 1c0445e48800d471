"""What happened to a run as lines of JSON: its starts, its failures, its end.

The launcher writes them; where another program started the ranks, rank 0 does. A run without an end was killed, or
goes on.
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
    """``attempt`` counts from 0 within one command; ``folder`` is where its ranks report; an end has a ``status``."""

    at: float  # seconds since the epoch
    kind: str
    attempt: int
    text: str = ""
    folder: str | None = None
    host: str = ""  # that wrote it
    status: int | None = None
    stopped: bool = False  # by request


class EventLog:
    """Appends to events.jsonl, also where its folder is moved; on a full disk an event is lost, never the run."""

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
    """An end for an error that the block raises."""
    try:
        yield
    except BaseException as error:
        log.ended(attempt, getattr(error, "status", 1), why=str(error))
        raise


def read_events(path: Path) -> list[RunEvent]:
    """Those that are whole, oldest first."""
    events = []
    with suppress(OSError), path.open("rb") as file:
        for line in bounded_lines(file, _MOST_LINE_BYTES):
            with suppress(ValueError, TypeError):
                event = RunEvent(**parse_json(line or b""))
                if isinstance(event.at, (int, float)) and isinstance(event.attempt, int):
                    events.append(event)
    return events
