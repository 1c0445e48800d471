"""The metrics of a run as lines of JSON, one file for all its starts: no step is in it twice."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
TOLD_AGAIN_BYTES = 16_384


class MetricLines:
    """Appends to ``folder``/metrics.jsonl, after what an earlier start wrote beyond ``step`` is cut off."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / NAME
        cut_after(self.path, step)
        self._file = self.path.open("ab", buffering=0)

    def cut_after(self, step: int) -> None:
        """Forgets later steps: the run has gone back."""
        cut_after(self.path, step)

    def write(self, record: Mapping[str, Any]) -> None:
        """One line; a disk that is full costs the line, never the run."""
        line = json.dumps({name: _plain(value) for name, value in record.items()}).encode() + b"\n"
        with contextlib.suppress(OSError):
            written = self._file.write(line)
            if written < len(line):  # half a line would spoil the next one
                self._file.truncate(self._file.tell() - written)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, as far as they are whole."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from (record for line in file if (record := _record(line)) is not None)


class Follower:
    """`new`: the records that have come since it was last asked.

    Where the file was cut meanwhile nobody knows what came after that: the last ones are told, some of them again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size if path.is_file() else 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._at:
                self._at = max(0, size - TOLD_AGAIN_BYTES)
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
        records = (_record(line) for line in whole.splitlines(keepends=True))
        return [record for record in records if record is not None]


def cut_after(path: Path, step: int) -> None:
    """Ends a file before its first line of a later step, or its first broken one; who follows it can go on."""
    if not path.is_file():
        return
    end = 0
    with path.open("r+b") as file:
        for line in file:
            record = _record(line)
            if record is None or record["step"] > step:
                break
            end += len(line)
        file.truncate(end)


def _record(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole: a process that is killed writes half of one."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
